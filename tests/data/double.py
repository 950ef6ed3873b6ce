"""Test doubles of a prompt encoder, an autoencoder and a network that takes prompts.

They stand in for those of a real family: tiny, and the same on every machine. As a script:
`python double.py RECIPE` encodes the data of a recipe with them, `python double.py RECIPE train`
trains on them. ENCODE_SECONDS in the environment makes each batch of prompts take that long.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

import fewstep
from fewstep.diffusion.paths import RectifiedFlow
from fewstep.models.encoders import Autoencoder, Encoding, PromptEncoder
from fewstep.models.model import Condition, Model

LENGTH, WIDTH = 3, 4


class DoubleEncoder(PromptEncoder):
    """A test double: each prompt's numbers are made from its SHA-256; prompts are words."""

    def __init__(self, salt: str = "") -> None:
        self.identity = {"class": "DoubleEncoder", "salt": salt}
        self.salt = salt
        self.seen: list[str] = []

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Embeddings [B, LENGTH, WIDTH] in -1..1 and the number of words [B]."""
        time.sleep(float(os.environ.get("ENCODE_SECONDS", "0")))
        self.seen += prompts
        rows = [hashlib.sha256((self.salt + text).encode()).digest() for text in prompts]
        count = LENGTH * WIDTH
        numbers = torch.tensor([[byte / 127.5 - 1 for byte in row[:count]] for row in rows])
        words = torch.tensor([len(text.split()) for text in prompts])
        return {"text": numbers.reshape(-1, LENGTH, WIDTH), "words": words}


class DoubleAutoencoder(Autoencoder):
    """A test double: latents are pixels averaged over two by two, and their mean as a channel."""

    identity = {"class": "DoubleAutoencoder"}  # noqa: RUF012

    def encode(self, images: Tensor) -> Tensor:
        """Latents [B, 4, H/2, W/2]."""
        small = avg_pool2d(images, 2)
        return torch.cat([small, small.mean(1, keepdim=True)], 1)

    def decode(self, latents: Tensor) -> Tensor:
        """Images, without what was averaged away."""
        return interpolate(latents[:, :3], scale_factor=2)


class DoubleNetwork(nn.Module):
    """A linear layer over sample, level and text."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size + 1 + LENGTH * WIDTH, size)

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        flat = torch.cat([x.flatten(1), sigma[:, None], text.flatten(1)], 1)
        return self.layer(flat).reshape(x.shape)


class DoubleModel(Model):
    """A test double of a family that takes prompts: four by four latents of four channels."""

    prediction = "velocity"
    prompted = True
    supports_guidance = True

    def __init__(
        self,
        salt: str = "",
        latent: bool = True,
        sample_shape: tuple[int, ...] = (4, 4, 4),
        weights: Path | None = None,
    ) -> None:
        self.path = RectifiedFlow(timestep_scale=1.0)
        self.sample_shape = sample_shape
        self.salt, self.latent = salt, latent
        self.files = {"weights": weights} if weights is not None else {}
        self.encoder = DoubleEncoder(salt)
        self.none: Condition = {}

    def build_network(self) -> nn.Module:
        return DoubleNetwork(torch.Size(self.sample_shape).numel()).eval()

    def load_network(self, directory: Path) -> nn.Module:
        raise NotImplementedError

    def save_network(self, network: nn.Module, directory: Path) -> None:
        raise NotImplementedError

    def forward(self, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        return network(x, sigma, condition["text"].to(x.dtype))

    def take_unconditional(self, condition: Condition) -> None:
        self.none = condition

    def unconditional(self, condition: Condition) -> Condition:
        count = len(condition["text"])
        return {key: value.expand(count, *value.shape) for key, value in self.none.items()}

    def example_condition(self, count: int) -> dict[str, Tensor]:
        return {"text": torch.zeros(count, LENGTH, WIDTH)}

    def prompt_encoder(self, device: torch.device, dtype: torch.dtype) -> PromptEncoder:
        return self.encoder

    def autoencoder(self, device: torch.device, dtype: torch.dtype) -> Autoencoder | None:
        return DoubleAutoencoder() if self.latent else None

    def encoding(self) -> Encoding:
        return Encoding({"salt": self.salt}, self.files)


if __name__ == "__main__":
    recipe = fewstep.load_recipe(sys.argv[1])
    if sys.argv[2:] == ["train"]:
        fewstep.train(recipe, model=DoubleModel())
    else:
        fewstep.encode(recipe, model=DoubleModel())
