"""Data sets by number: what each item is conditioned on, and its clean sample if it has one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor


class Items(ABC):
    """Numbered items, in memory or on disk. Every process of a run opens the same.

    Attributes:
        sha256: of all that a run learns from, hexadecimal.
        has_samples: whether items have clean samples, or conditions alone.
        prompts: the text of each item, where there is one.
        unconditional: the condition that stands for none, each entry [...] without a batch's
            dimension; empty where the network has one of its own.
    """

    has_samples: bool
    prompts: Sequence[str] | None = None
    unconditional: Mapping[str, Tensor] = {}

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Of all that a run learns from, hexadecimal."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def condition(self, items: Tensor) -> dict[str, Tensor]:
        """What items are conditioned on: each entry [B, ...], on the CPU.

        Args:
            items: their numbers, int64 [B].
        """

    @abstractmethod
    def x0(self, items: Tensor) -> Tensor:
        """The clean samples of items [B, ...], as networks see them, on the CPU.

        Args:
            items: their numbers, int64 [B].

        Raises:
            ValueError: where they have none.
        """
