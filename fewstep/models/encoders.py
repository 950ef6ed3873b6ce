"""What stands between a network and people: prompts to tensors, images to latents and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor


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
