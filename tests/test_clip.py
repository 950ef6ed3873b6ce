"""The CLIP score, by a tiny random CLIP model that transformers has written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from clip_model import write_tiny_clip
from transformers import CLIPModel, CLIPProcessor

from fewstep.clip import ClipScore
from fewstep.errors import UserError

PROMPTS = ["a cat", "two dogs and a very long tail " * 9, "blue"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"))


@torch.no_grad()
def by_hand(weights: Path, images: torch.Tensor, prompts: list[str]) -> list[float]:
    """100 * max(cos, 0) of each pair, from the towers themselves, one pair at a time."""
    model = CLIPModel.from_pretrained(weights).eval()
    processor = CLIPProcessor.from_pretrained(weights)
    mean, std = (
        torch.tensor(getattr(processor.image_processor, name)).reshape(1, 3, 1, 1)
        for name in ("image_mean", "image_std")
    )
    found = []
    for image, prompt in zip(images, prompts, strict=True):
        levels = ((image[None] + 1) / 2 * 255).round() / 255
        tokens = processor.tokenizer(prompt, return_tensors="pt", truncation=True)
        pixels = model.vision_model((levels - mean) / std).pooler_output
        words = model.text_model(**tokens).pooler_output
        a, b = model.visual_projection(pixels)[0], model.text_projection(words)[0]
        found.append(100 * max(float(a @ b / (a.norm() * b.norm())), 0.0))
    return found


def test_the_score_is_that_of_the_towers(weights: Path) -> None:
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected = by_hand(weights, images, PROMPTS)
    assert ClipScore(str(weights))(images, PROMPTS) == pytest.approx(sum(expected) / 3, abs=1e-3)
    # Whatever the portions; and prompts go with their images.
    assert ClipScore(str(weights), batch_size=2)(images, PROMPTS) == pytest.approx(
        sum(expected) / 3, abs=1e-3
    )
    assert max(expected) - min(expected) > 1e-2


def test_a_revision_on_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, **options: str) -> None:
        asked.append((name, options))
        raise OSError("not here")

    monkeypatch.setattr(CLIPModel, "from_pretrained", load)
    for name in ("owner/clip", "owner/clip@v1"):
        with pytest.raises(UserError, match=f"CLIP: {name} cannot be loaded"):
            ClipScore(name)
    assert asked == [("owner/clip", {}), ("owner/clip", {"revision": "v1"})]


def test_what_is_no_clip_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"CLIP: .*nothing cannot be loaded"):
        ClipScore(str(tmp_path / "nothing"))


def test_images_and_prompts_must_be_as_many(weights: Path) -> None:
    with pytest.raises(ValueError, match="2 images, but 3 prompts"):
        ClipScore(str(weights))(torch.zeros(2, 3, 32, 32), PROMPTS)
