import json
import re
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.models.unets.unet_2d import UNet2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.dit import DiT, DiTNetwork, DiTSettings

SIZE = DiTNetwork(
    sample_size=4,
    in_channels=1,
    patch_size=2,
    num_layers=1,
    num_attention_heads=2,
    attention_head_dim=8,
    num_embeds_ada_norm=5,
)
WEIGHTS = "diffusion_pytorch_model.safetensors"


def make(**options: object) -> tuple[DiT, torch.nn.Module]:
    torch.manual_seed(0)
    model = DiT(SIZE, **options)  # type: ignore[arg-type]
    return model, model.build_network()


def inputs(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.linspace(0.1, 1, count), torch.arange(count)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, network = make()
    model.save_network(network, tmp_path / "dit")
    return tmp_path / "dit"


@pytest.mark.parametrize("scale", [1000.0, 1.0])
def test_forward_equals_the_networks_own_call(scale: float) -> None:
    model, network = make(timestep_scale=scale)
    x, sigma, labels = inputs()
    output = model.forward(network, x, sigma, {"class_labels": labels})
    expected = network(x, timestep=sigma * scale, class_labels=labels).sample
    assert output.shape == x.shape
    assert torch.equal(output, expected)
    other = network(x, timestep=sigma * scale * 0.5, class_labels=labels).sample
    assert not torch.equal(output, other)


def test_the_null_label_is_one_past_the_classes() -> None:
    model, network = make()
    x, sigma, labels = inputs()
    none = model.unconditional({"class_labels": labels})
    assert model.classes == 5
    assert none["class_labels"].tolist() == [5, 5, 5]
    assert none["class_labels"].dtype == labels.dtype
    assert labels.tolist() == [0, 1, 2]
    conditional = model.forward(network, x, sigma, {"class_labels": labels})
    unconditional = model.forward(network, x, sigma, none)
    assert not torch.allclose(conditional, unconditional)


def test_new_networks_draw_no_labels_away() -> None:
    model, network = make()
    x, sigma, labels = inputs(16)
    labels = labels % 5
    assert not any(m.training for m in network.modules())
    state = torch.get_rng_state()
    first = model.forward(network, x, sigma, {"class_labels": labels})
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, model.forward(network, x, sigma, {"class_labels": labels}))


def test_lora_targets_exist_in_the_network() -> None:
    model, network = make()
    linear = [n for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)]
    for target in model.lora_targets:
        assert any(name.endswith(f".{target}") for name in linear)


def test_sample_shape_and_settings() -> None:
    built = DiTSettings(network=SIZE, prediction="eps", guidance_distilled=True).build()
    assert built.sample_shape == (1, 4, 4)
    assert built.prediction == "eps"
    assert built.guidance_distilled
    assert built.supports_guidance
    with pytest.raises(ValueError, match="give 'weights'"):
        DiTSettings()


def test_weights_round_trip_and_diffusers_reads_them(saved: Path) -> None:
    model, network = make()
    x, sigma, labels = inputs()
    condition = {"class_labels": labels}
    loaded = model.load_network(saved)
    assert not any(m.training for m in loaded.modules())
    expected = model.forward(network, x, sigma, condition)
    assert torch.equal(model.forward(loaded, x, sigma, condition), expected)
    plain = DiTTransformer2DModel.from_pretrained(saved).eval()
    assert torch.equal(model.forward(plain, x, sigma, condition), expected)


def test_size_is_read_from_the_weights(saved: Path) -> None:
    assert DiTSettings(weights=str(saved)).with_network_of(saved).network == SIZE
    other = DiTSettings(weights=str(saved), network=DiTNetwork())
    with pytest.raises(UserError, match=r"model\.network differs from .*config\.json"):
        other.with_network_of(saved)


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_options_that_are_not_supported_are_named(saved: Path) -> None:
    edit_config(saved, activation_fn="geglu")
    with pytest.raises(UserError, match=r"config\.json: .*'activation_fn': 'geglu'.*not supported"):
        DiTSettings(weights=str(saved)).with_network_of(saved)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": "two"}, "num_layers"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": None}, "num_layers"),
        ({"patch_size": 3}, r"sample_size \(4\) must be a multiple of patch_size \(3\)"),
    ],
)
def test_an_impossible_size_names_the_file(saved: Path, changes: dict, words: str) -> None:
    edit_config(saved, **changes)
    with pytest.raises(UserError, match=rf"config\.json: .*{words}"):
        DiTSettings(weights=str(saved)).with_network_of(saved)


def test_patches_cover_a_sample() -> None:
    with pytest.raises(ValueError, match="must be a multiple of patch_size"):
        DiTNetwork(sample_size=8, patch_size=3)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(UserError, match=f"{re.escape(str(nowhere))} is not a directory"):
        DiTSettings(weights=str(nowhere)).with_network_of(nowhere)
    with pytest.raises(UserError, match=re.escape(str(nowhere))):
        make()[0].load_network(nowhere)


def test_a_directory_without_a_network_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))} is neither a run directory"):
        DiTSettings(weights=str(tmp_path)).with_network_of(tmp_path)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        make()[0].load_network(tmp_path)


def test_broken_json_names_the_file(saved: Path) -> None:
    (saved / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read as JSON"):
        DiTSettings(weights=str(saved)).with_network_of(saved)
    with pytest.raises(UserError, match=re.escape(str(saved))):
        make()[0].load_network(saved)


def test_another_class_is_named(tmp_path: Path) -> None:
    unet = UNet2DModel(
        sample_size=4,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=4,
    )
    unet.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"config\.json describes a UNet2DModel.*DiTTransformer2D"):
        DiTSettings(weights=str(tmp_path)).with_network_of(tmp_path)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        make()[0].load_network(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 50, -1], ids=["empty", "stub", "header", "last byte"])
def test_truncated_weights_name_the_file(saved: Path, keep: int) -> None:
    file = saved / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=f"{WEIGHTS} is corrupt or truncated"):
        make()[0].load_network(saved)


def test_missing_surplus_and_misshapen_tensors_are_named(saved: Path) -> None:
    file, model = saved / WEIGHTS, make()[0]
    whole = load_file(file)
    name = "transformer_blocks.0.attn1.to_q.weight"
    for state in (
        {key: value for key, value in whole.items() if key != name},
        whole | {"stray": torch.zeros(2)},
        whole | {name: torch.zeros(3, 3)},
    ):
        save_file(state, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=re.escape(str(saved))) as caught:
            model.load_network(saved)
        assert ("stray" if "stray" in state else name) in str(caught.value)
    save_file(whole, file, metadata={"format": "pt"})
    model.load_network(saved)
