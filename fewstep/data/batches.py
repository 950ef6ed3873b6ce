"""Batches in a keyed order: a pure function of the run's seed and the phase they are for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from fewstep.data.items import Items
from fewstep.diffusion.draw import Draw, permutation


@final
@dataclass(frozen=True)
class Batch:
    """The samples of one phase, or a micro-batch of them.

    Attributes:
        sample_ids: int64 [B], unique within the phase: the key of each sample's random numbers.
        condition: what the network is conditioned on, each entry [B, ...].
        x0: clean data [B, ...], where the method trains on data.
    """

    sample_ids: Tensor
    condition: Mapping[str, Tensor]
    x0: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def rows(self, start: int, stop: int) -> Batch:
        """The samples from `start` up to `stop`, as views."""
        return Batch(
            self.sample_ids[start:stop],
            {key: value[start:stop] for key, value in self.condition.items()},
            self.x0[start:stop] if self.x0 is not None else None,
        )


class BatchSource(ABC):
    """Where phases get their samples from."""

    @abstractmethod
    def batch(self, draw: Draw, size: int, rows: range | None = None) -> Batch:
        """The samples of a phase, or some of them.

        Args:
            draw: of the phase; its cycle (1, 2, ...) is the position in the data.
            size: number of samples of the phase.
            rows: which of them are wanted; None: all.
        """


@final
@dataclass(frozen=True)
class DataBatches(BatchSource):
    """Items of a data set, each once an epoch, in an order keyed by seed and epoch.

    Each cycle takes the next `size` items, across the end of an epoch if need be. Phases of other
    names go through the data in orders of their own.

    Attributes:
        items: the data set.
        device: of the batches.
        dtype: of all their entries that are floating point.
        samples: whether batches hold clean data, or conditions alone.
    """

    items: Items
    device: torch.device
    dtype: torch.dtype = torch.float32
    samples: bool = True

    def batch(self, draw: Draw, size: int, rows: range | None = None) -> Batch:
        """See `BatchSource.batch`."""
        ids = _ids(size, rows, self.device)
        stream = "order" if draw.phase == "student" else f"order/{draw.phase}"
        first, length = (draw.cycle - 1) * size, len(self.items)
        numbers = _items(draw.seed, stream, first, size, length)[ids.cpu()]
        condition = {k: self._here(v) for k, v in self.items.condition(numbers).items()}
        x0 = self._here(self.items.x0(numbers)) if self.samples else None
        return Batch(ids, condition, x0)

    def _here(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device, dtype)


def _ids(size: int, rows: range | None, device: torch.device) -> Tensor:
    rows = rows if rows is not None else range(size)
    return torch.arange(rows.start, rows.stop, device=device)


def _items(seed: int, stream: str, first: int, size: int, length: int) -> Tensor:
    """Indices of items number `first` to `first + size` of an endless row of epochs: int64."""
    epochs = range(first // length, (first + size - 1) // length + 1)
    start = first - epochs[0] * length
    return torch.cat([_order(seed, stream, epoch, length) for epoch in epochs])[
        start : start + size
    ]


@lru_cache(maxsize=16)
def _order(seed: int, stream: str, epoch: int, length: int) -> Tensor:
    return permutation(seed, epoch, length, stream)


@final
@dataclass(frozen=True)
class ConditionBatches(BatchSource):
    """Conditions alone, for methods that need no data: labels uniform over the classes."""

    classes: int | None
    device: torch.device

    def batch(self, draw: Draw, size: int, rows: range | None = None) -> Batch:
        """See `BatchSource.batch`."""
        ids = _ids(size, rows, self.device)
        if self.classes is None:
            return Batch(ids, {})
        return Batch(ids, {"class_labels": draw.integers("labels", ids, self.classes)})


def batch_source(
    items: Items | None,
    classes: int | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    samples: bool,
) -> BatchSource:
    """Where a run's phases get their samples from; equal in all of its processes.

    Args:
        items: the data set, if there is one.
        classes: of the network.
        device: of the batches.
        dtype: of their floating-point entries.
        samples: whether the method needs clean data.
    """
    if items is not None and (samples or items.prompts is not None):
        return DataBatches(items, device, dtype, samples)
    return ConditionBatches(classes, device)
