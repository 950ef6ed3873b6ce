import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from sd3_pipeline import tiny_pipeline, write_tiny_pipeline
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.sd3 import SD3, SD3Settings
from fewstep.models.sd3_encoders import (
    SD3Autoencoder,
    SD3PromptEncoder,
    empty_decoder,
    images_at_once,
)

CPU = torch.device("cpu")
PROMPTS = ("", "the red cat", "A house, on the red cat! " * 40)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("sd3") / "pipeline")


@pytest.fixture(scope="module")
def stock() -> StableDiffusion3Pipeline:
    return tiny_pipeline()


def encoder(directory: Path, length: int = 20, width: int = 32) -> SD3PromptEncoder:
    return SD3PromptEncoder(directory, length, width, CPU, torch.float32)


def by_stock(stock: StableDiffusion3Pipeline, length: int) -> dict[str, Tensor]:
    with torch.no_grad():
        embeds, _, pooled, _ = stock.encode_prompt(
            list(PROMPTS),
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
    return {"prompt_embeds": embeds, "pooled": pooled}


@pytest.mark.parametrize("length", [20, 256])
def test_prompts_are_encoded_as_by_the_stock_pipeline(
    pipeline: Path, stock: StableDiffusion3Pipeline, length: int
) -> None:
    ours, theirs = encoder(pipeline, length).encode(PROMPTS), by_stock(stock, length)
    assert ours.keys() == theirs.keys()
    assert ours["prompt_embeds"].shape == (3, 77 + length, 32)
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key
        assert not torch.allclose(value[0], value[1])


def test_the_empty_prompt_is_the_stock_pipelines_negative_one(
    pipeline: Path, stock: StableDiffusion3Pipeline
) -> None:
    with torch.no_grad():
        _, embeds, _, pooled = stock.encode_prompt("a", None, None, max_sequence_length=20)
    ours = encoder(pipeline).encode([""])
    assert torch.equal(ours["prompt_embeds"], embeds)
    assert torch.equal(ours["pooled"], pooled)


def test_a_pipeline_without_t5_is_encoded_as_by_the_stock_pipeline(tmp_path: Path) -> None:
    directory = write_tiny_pipeline(tmp_path / "two", t5=False)
    ours, theirs = encoder(directory).encode(PROMPTS), by_stock(tiny_pipeline(t5=False), 20)
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key
    assert not ours["prompt_embeds"][:, 77:].any()


def test_the_identity_changes_with_what_decides_the_output(pipeline: Path, tmp_path: Path) -> None:
    first = encoder(pipeline).identity
    copy = Path(shutil.copytree(pipeline, tmp_path / "copy"))
    assert encoder(copy).identity == first
    assert encoder(copy, 21).identity != first
    file = "text_encoder_2/model.safetensors"
    assert len(first[file]) == 64
    other = tiny_pipeline(seed=1)
    other.text_encoder_2.save_pretrained(copy / "text_encoder_2")
    changed = {k for k, v in encoder(copy).identity.items() if first[k] != v}
    assert changed == {file}
    shutil.rmtree(copy / "text_encoder_3")
    assert "text_encoder_3/model.safetensors" not in encoder(copy).identity


def test_missing_and_broken_encoders_are_named(pipeline: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(pipeline, tmp_path / "copy"))
    (copy / "text_encoder_2" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="text_encoder_2 cannot be loaded"):
        encoder(copy)
    shutil.rmtree(copy / "text_encoder")
    with pytest.raises(UserError, match="text_encoder does not exist"):
        encoder(copy)


def test_encoders_of_another_width_are_refused(pipeline: Path, tmp_path: Path) -> None:
    other = tiny_pipeline(transformer={"pooled_projection_dim": 24}).transformer
    other.save_pretrained(tmp_path / "net")
    settings = SD3Settings(weights=str(tmp_path / "net"), pipeline=str(pipeline))
    model = settings.with_network_of(tmp_path / "net").build()
    with pytest.raises(UserError, match="pooled_projection_dim is 24, the text encoder gives 20"):
        model.prompt_encoder(CPU, torch.float32)


# The autoencoder.


def test_latents_are_the_stock_autoencoders_shifted_and_scaled(pipeline: Path) -> None:
    vae = AutoencoderKL.from_pretrained(pipeline / "vae").eval()
    images = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    ours = SD3Autoencoder(pipeline, CPU, torch.float32).encode(images)
    with torch.no_grad():
        mode = vae.encode(images).latent_dist.mode()
    assert ours.shape == (5, 4, 8, 8)
    torch.testing.assert_close(ours, (mode - 0.0609) * 1.5305)


def test_images_are_those_of_the_stock_pipeline(
    pipeline: Path, stock: StableDiffusion3Pipeline
) -> None:
    model = SD3Settings(weights=str(pipeline)).with_network_of(pipeline).build()
    assert isinstance(model, SD3)
    stock.set_progress_bar_config(disable=True)
    latents = torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    found = {}
    for kind in ("latent", "pt"):
        found[kind] = stock(
            ["the red cat"] * 5, num_inference_steps=1, guidance_scale=1.0, latents=latents,
            output_type=kind, max_sequence_length=20,
        ).images  # fmt: skip
    ours = model.decode(found["latent"])
    assert ours.shape == (5, 3, 64, 64)
    torch.testing.assert_close((ours / 2 + 0.5).clamp(0, 1), found["pt"], rtol=0, atol=1e-5)
    images = ours.clamp(-1, 1)
    coder = model.autoencoder(CPU, torch.float32)
    assert coder is not None
    assert torch.equal(model.encode(images), coder.encode(images))
    assert any(key.startswith("vae/") for key in coder.identity)


def test_images_go_through_the_autoencoder_a_few_at_a_time(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [images_at_once(side**2) for side in (64, 512, 1024, 2048)] == [256, 4, 1, 1]
    coder = SD3Autoencoder(pipeline, CPU, torch.float32)
    images = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = coder.encode(images)
    decoded = coder.decode(latents)
    sizes: dict[str, list[int]] = {"encode": [], "decode": []}
    for name, seen in sizes.items():
        call = getattr(coder._network, name)

        def spy(given: Tensor, *, call=call, seen=seen, **options: bool) -> object:
            seen.append(len(given))
            return call(given, **options)

        monkeypatch.setattr(coder._network, name, spy)
    monkeypatch.setattr("fewstep.models.sd3_encoders.PIXELS_AT_ONCE", 2 * 64 * 64)
    assert torch.allclose(coder.encode(images), latents, atol=1e-5)
    assert torch.allclose(coder.decode(latents), decoded, atol=1e-5)
    assert sizes == {"encode": [2, 2, 1], "decode": [2, 2, 1]}


def test_a_decoder_is_known_without_its_weights(pipeline: Path) -> None:
    here = empty_decoder(pipeline, (4, 8, 8)).network
    real = AutoencoderKL.from_pretrained(pipeline / "vae")
    assert {k: v.shape for k, v in here.state_dict().items()} == {
        k: v.shape for k, v in real.state_dict().items()
    }
    assert all(p.is_meta for p in here.parameters())
    published = empty_decoder(Path("owner/stable-diffusion"), (16, 128, 128)).network
    assert sum(p.numel() for p in published.parameters()) == 83_819_683


def test_prompts_that_are_cut_are_counted_by_t5_where_there_is_one(pipeline: Path) -> None:
    words = [" ".join(["red"] * count) for count in (0, 18, 19, 20, 100)]
    full = encoder(pipeline)
    # Each word is a token, and the end is one more.
    lengths = [len(full._t5[1](text).input_ids) for text in words]
    assert full.count_cut(words) == sum(length > 20 for length in lengths)
    assert 1 <= full.count_cut(words) <= 3
    alone = encoder(pipeline)
    alone._t5 = None
    assert alone.count_cut(words) == 1
