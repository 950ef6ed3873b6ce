"""From prompts and images to a trained run, with a whole Stable Diffusion 3 pipeline, if tiny."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from sd3_pipeline import RESOLUTION, write_tiny_pipeline

from fewstep.config import Recipe, dump_recipe, parse_recipe
from fewstep.data.images import decode_image
from fewstep.models.sd3_encoders import SD3Autoencoder, SD3PromptEncoder
from fewstep.run import open_run

pytestmark = pytest.mark.usefixtures("no_sync")
CPU = torch.device("cpu")


@pytest.fixture
def recipe(data_recipe, tmp_path: Path) -> Recipe:
    """Fine-tune the tiny pipeline on three images; one is held out."""
    pipeline = write_tiny_pipeline(tmp_path / "pipeline")
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.linear_gradient("L").rotate(90 * number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a red cat, the {number}")
    values = data_recipe("images", folder, validation_items=1).model_dump(mode="json")
    model = {"family": "sd3", "weights": str(pipeline), "max_sequence_length": 8}
    return parse_recipe(values | {"model": model})


def test_images_are_encoded_and_trained_on(recipe: Recipe, tmp_path: Path, fewstep) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    code, _, err = fewstep("train", file)
    assert (code, "make it with `fewstep encode`" in err) == (2, True)
    code, out, _ = fewstep("encode", file)
    assert (code, "Encoded: 3 train, 1 validation items" in out) == (0, True)
    items = recipe.data.load()
    prompts = [f"a red cat, the {number}" for number in range(3)]
    assert list(items.prompts) == prompts
    pipeline = tmp_path / "pipeline"
    expected = SD3PromptEncoder(pipeline, 8, 32, CPU, torch.float32).encode(prompts)
    for key, value in items.condition(torch.arange(3)).items():
        assert torch.allclose(value, expected[key], atol=1e-5), key
    size, folder = (RESOLUTION, RESOLUTION), tmp_path / "images"
    files = [(folder / f"{n}.png").read_bytes() for n in range(3)]
    pictures = [decode_image(file, *size, (0, 0, 0), "RGB") for file in files]
    latents = SD3Autoencoder(pipeline, CPU, torch.float32).encode(torch.stack(pictures))
    assert torch.allclose(items.x0(torch.arange(3)), latents, atol=1e-5)
    code, out, _ = fewstep("train", file)
    assert (code, "Complete: 4 cycles" in out) == (0, True)
    assert open_run(tmp_path / "run").complete
    code, out, _ = fewstep("encode", file)
    assert (code, "is complete already, and undamaged" in out) == (0, True)


def test_another_encoder_is_noticed_without_loading_it(
    recipe: Recipe, tmp_path: Path, fewstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert fewstep("encode", file)[0] == 0
    weights = tmp_path / "pipeline" / "text_encoder_2" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    monkeypatch.setattr(SD3PromptEncoder, "__init__", lambda *_: pytest.fail("was loaded"))
    code, _, err = fewstep("train", file)
    assert (code, "encoders.text_encoder_2: its content has changed" in err) == (2, True)
    code, _, err = fewstep("train", file, "model.max_sequence_length=9")
    assert (code, "model.max_sequence_length: was '8', is '9'" in err) == (2, True)
    code, _, err = fewstep("encode", file)
    assert (code, "encoders.text_encoder_2: was 'content" in err) == (2, True)


def test_prompts_that_are_cut_are_told(recipe: Recipe, tmp_path: Path, fewstep, caplog) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    for number in (0, 3):  # one to learn from, one held out
        (tmp_path / "images" / f"{number}.txt").write_text("a red cat " * 9)
    code, out, _ = fewstep("encode", file)
    assert (code, "Cut: 2 prompts are longer than their encoder looks at" in out) == (0, True)
    code, out, _ = fewstep("encode", file)  # what is there already knows it
    assert (code, "Cut: 2 prompts" in out) == (0, True)
    fewstep("train", file, "train.cycles=1")
    images = fewstep("sample", tmp_path / "run", "--prompt", "a cat", "--out", tmp_path / "a.png")
    assert (images[0], "which are cut" in caplog.text) == (0, False)
    long = ["--prompt", "a red cat " * 9, "--prompt", "a cat"]
    assert fewstep("sample", tmp_path / "run", *long, "--out", tmp_path / "b.png")[0] == 0
    assert "prompts longer than their encoder looks at, which are cut: 1" in caplog.text
