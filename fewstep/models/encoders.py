"""What stands between a network and people: prompts to tensors, images to latents and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from torch import Tensor, nn

VAE = "vae"
"""The name in `Encoding.files` of what encodes images; all others encode prompts."""


@final
@dataclass(frozen=True)
class Encoding:
    """What decides how prompts and images are encoded, known without loading anything.

    A run compares it with what its data were encoded by.

    Attributes:
        settings: by name, as plain text.
        files: files or directories, by what they are for; they may lie elsewhere tomorrow.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Decoder:
    """What makes images of latents, without memory, to see how much it would take.

    Attributes:
        network: on the meta device.
        decode: calls it for as many latents as are decoded together.
    """

    network: nn.Module
    decode: Callable[[], object]


class PromptEncoder(ABC):
    """Turns prompts into what a network is conditioned on.

    Attributes:
        identity: what decides its output, as plain text by name: class, files and their
            checksums, lengths. Encoded data of another identity are another data set.
    """

    identity: Mapping[str, str]

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """The condition of prompts: each entry [B, ...] of a fixed shape, on the CPU.

        The empty prompt is one like any other: it stands for no condition.
        """

    def count_cut(self, prompts: Sequence[str]) -> int:
        """How many prompts are longer than what is looked at; by default any length is."""
        return 0


class Autoencoder(ABC):
    """Between images, float [B, C, H, W] in [-1, 1], and the latents that a network works on.

    Attributes:
        identity: what decides its output, as for `PromptEncoder`.
    """

    identity: Mapping[str, str]

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Latents of images, on the CPU; the same ones every time."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Images of latents, where these are."""
