"""Data sets by number: what each item is conditioned on, and its clean sample if it has one."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import final, overload

import torch
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


@final
class Texts(Sequence[str]):
    """Texts by number, each read when it is asked for."""

    def __init__(self, count: int, text: Callable[[int], str]) -> None:
        """`text`: gives number 0, 1, ..., below `count`."""
        self._numbers, self._text = range(count), text

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """One text, or several."""
        numbers = self._numbers[index]
        if isinstance(numbers, range):
            return [self._text(number) for number in numbers]
        return self._text(numbers)


@final
class JoinedItems(Items):
    """Items of one data set, and after them those of another of the same kind."""

    def __init__(self, first: Items, second: Items) -> None:
        """Both have samples, or neither; both have prompts, or neither."""
        self._parts = (first, second)
        self.has_samples = first.has_samples and second.has_samples
        self.unconditional = first.unconditional
        if first.prompts is not None and second.prompts is not None:
            self.prompts = Texts(len(self), self._prompt)

    @property
    def sha256(self) -> str:
        """Of both."""
        return hashlib.sha256("".join(p.sha256 for p in self._parts).encode()).hexdigest()

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def condition(self, items: Tensor) -> dict[str, Tensor]:
        """See `Items.condition`."""
        found = [part.condition(numbers) for part, numbers in self._split(items)]
        return {key: _in_order(items, [one[key] for one in found]) for key in found[0]}

    def x0(self, items: Tensor) -> Tensor:
        """See `Items.x0`."""
        return _in_order(items, [part.x0(numbers) for part, numbers in self._split(items)])

    def _prompt(self, number: int) -> str:
        ((part, numbers),) = self._split(torch.tensor([number]))
        assert part.prompts is not None
        return part.prompts[int(numbers)]

    def _split(self, items: Tensor) -> list[tuple[Items, Tensor]]:
        """The parts that are asked for anything, and for what, in ascending order."""
        first, second = self._parts
        ordered = items.sort(stable=True).values
        mine = ordered < len(first)
        asked = [(first, ordered[mine]), (second, ordered[~mine] - len(first))]
        return [(part, numbers) for part, numbers in asked if len(numbers)]


def _in_order(items: Tensor, found: Sequence[Tensor]) -> Tensor:
    """What was found for items in ascending order, in the order that they were asked for."""
    return torch.cat(list(found))[items.argsort(stable=True).argsort()]
