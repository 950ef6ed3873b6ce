"""Batches in a keyed order: a pure function of the run's seed and the phase they are for."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

import torch
from torch import Tensor

from fewstep.data.dataset import Dataset
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
    """Clean data with labels, every item once an epoch, in an order keyed by seed and epoch.

    Each cycle takes the next `size` items, across the end of an epoch if need be.
    """

    dataset: Dataset
    device: torch.device
    dtype: torch.dtype = torch.float32

    @cached_property
    def sha256(self) -> str:
        """Of the samples and labels, hexadecimal."""
        content = hashlib.sha256()
        for tensor in (self.dataset.samples, self.dataset.labels):
            if tensor is not None:
                content.update(tensor.detach().cpu().numpy().tobytes())
        return content.hexdigest()

    def batch(self, draw: Draw, size: int, rows: range | None = None) -> Batch:
        """See `BatchSource.batch`."""
        ids = _ids(size, rows, self.device)
        items = _items(draw.seed, (draw.cycle - 1) * size, size, len(self.dataset))[ids.cpu()]
        labels = self.dataset.labels
        condition = {} if labels is None else {"class_labels": labels[items].to(self.device)}
        x0 = self.dataset.samples[items].to(self.device, self.dtype)
        return Batch(ids, condition, x0)


def _ids(size: int, rows: range | None, device: torch.device) -> Tensor:
    rows = rows if rows is not None else range(size)
    return torch.arange(rows.start, rows.stop, device=device)


def _items(seed: int, first: int, size: int, length: int) -> Tensor:
    """Indices of items number `first` to `first + size` of an endless row of epochs: int64."""
    epochs = range(first // length, (first + size - 1) // length + 1)
    start = first - epochs[0] * length
    return torch.cat([_order(seed, epoch, length) for epoch in epochs])[start : start + size]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> Tensor:
    return permutation(seed, epoch, length)


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
