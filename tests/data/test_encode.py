"""Encoding: what is written, that it goes on after a stop, and that nothing stale is used."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from double import DoubleAutoencoder, DoubleEncoder, DoubleModel
from PIL import Image

import fewstep
from fewstep.config import Recipe

pytestmark = pytest.mark.usefixtures("no_sync")
DOUBLE = Path(__file__).with_name("double.py")
PROMPTS = ("a red circle", "ein Fußball", "a red circle", "猫, with \u2028 inside", "five")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Five prompts, two of them equal, in a file."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Five images of one colour each, with captions beside them."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):
        Image.new("RGB", (12, 9), (50 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"image {number}\n")
    return folder


def content(recipe: Recipe) -> dict[str, bytes]:
    """All files of a recipe's encoded data."""
    return {file.name: file.read_bytes() for file in recipe.data.directory.iterdir()}


def test_prompts_are_encoded_and_read_back(data_recipe, prompts) -> None:
    recipe, model = data_recipe("prompts", prompts), DoubleModel()
    encoded = fewstep.encode(recipe, model=model)
    items = recipe.data.load()
    assert (encoded.items, encoded.skipped, encoded.made) == ({"train": 5}, [], 3)
    assert list(items.prompts) == list(PROMPTS)
    expected = DoubleEncoder().encode(PROMPTS)
    order = torch.tensor([4, 0, 3, 3, 1])
    for key, value in items.condition(order).items():
        assert torch.equal(value, expected[key][order]), key
    for key, value in items.unconditional.items():
        assert torch.equal(value, DoubleEncoder().encode([""])[key][0]), key
    assert not items.has_samples
    with pytest.raises(ValueError, match="prompts alone"):
        items.x0(order)
    with pytest.raises(IndexError, match="from 0 to 4"):
        items.condition(torch.tensor([5]))


def test_images_are_encoded_and_read_back(data_recipe, images) -> None:
    recipe = data_recipe("images", images)
    fewstep.encode(recipe, model=DoubleModel())
    items = recipe.data.load()
    assert items.prompts[1:3] == ["image 1", "image 2"]
    red = torch.tensor([0, 50, 200]) / 127.5 - 1
    pixels = torch.stack([red, torch.full((3,), -1.0), torch.full((3,), -1.0)], 1)
    flat = DoubleAutoencoder().encode(pixels[:, :, None, None].expand(3, 3, 8, 8))
    assert torch.allclose(items.x0(torch.tensor([0, 1, 4])), flat, atol=1e-6)
    assert items.x0(torch.tensor([0])).shape == (1, 4, 4, 4)


def test_only_the_place_travels_to_another_process(data_recipe, images) -> None:
    recipe = data_recipe("images", images)
    fewstep.encode(recipe, model=DoubleModel())
    items = recipe.data.load()
    items.x0(torch.arange(5))
    sent = pickle.dumps(items)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert torch.equal(again.x0(torch.arange(5)), items.x0(torch.arange(5)))
    assert again.sha256 == items.sha256
