"""How well images fit their prompts, by CLIP (Radford et al., arXiv 2103.00020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from fewstep.errors import UserError
from fewstep.features import to_rgb_bytes
from fewstep.models.hub import split_hub_name


@final
class ClipScore:
    """CLIP score (Hessel et al., arXiv 2104.08718): 100 * max(cos(image, text), 0), averaged.

    Through transformers itself: torchmetrics' metric takes the names of a few hub models alone.
    """

    def __init__(self, weights: str, batch_size: int = 64) -> None:
        """Load a CLIP model with its processor.

        Args:
            weights: a directory that transformers wrote, or a name on the hub, with @REVISION
                after it for one commit, branch or tag.
            batch_size: images at once.

        Raises:
            UserError: where it cannot be loaded.
        """
        from transformers import CLIPModel, CLIPProcessor

        name, revision = split_hub_name(weights) or (weights, None)
        at = {"revision": revision} if revision is not None else {}
        try:
            self._model = CLIPModel.from_pretrained(name, **at).eval()
            self._processor = CLIPProcessor.from_pretrained(name, **at)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"CLIP: {weights} cannot be loaded: {reason}") from error
        self._batch_size = batch_size

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str]) -> float:
        """The mean score of images, float [N, 1 or 3, H, W] in [-1, 1], and their prompts."""
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images, but {len(prompts)} prompts")
        parts = range(0, len(images), self._batch_size)
        cosines = [self._cosines(images[i:][: self._batch_size], prompts[i:]) for i in parts]
        return float((100 * torch.cat(cosines)).clamp(min=0).mean())

    def _cosines(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        inputs = self._processor(
            text=list(prompts[: len(images)]),
            images=list(to_rgb_bytes(images).cpu()),
            return_tensors="pt",
            padding=True,
            truncation=True,
        )
        found = self._model(**inputs)
        return functional.cosine_similarity(found.image_embeds, found.text_embeds)
