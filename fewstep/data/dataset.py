"""Data sets that fit in memory: samples with optional class labels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

import torch
from torch import Tensor

from fewstep.data.digits import load_digits
from fewstep.data.items import Items

Split = Literal["train", "validation"]


@final
@dataclass(frozen=True)
class Dataset(Items):
    """Samples in memory.

    Attributes:
        samples: float32 [N, ...]; images in [-1, 1].
        labels: int64 [N], or None.
    """

    samples: Tensor
    labels: Tensor | None = None
    has_samples = True

    def __post_init__(self) -> None:
        if len(self.samples) == 0:
            raise ValueError("the data set is empty")
        if self.labels is not None and len(self.labels) != len(self.samples):
            raise ValueError(f"{len(self.samples)} samples, but {len(self.labels)} labels")
        if not torch.isfinite(self.samples).all():
            raise ValueError("the data set has entries that are not finite")

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def sha256(self) -> str:
        """Of the samples and labels."""
        content = hashlib.sha256()
        for tensor in (self.samples, self.labels):
            if tensor is not None:
                content.update(tensor.detach().cpu().numpy().tobytes())
        return content.hexdigest()

    def condition(self, items: Tensor) -> dict[str, Tensor]:
        """The class labels, if there are any."""
        return {} if self.labels is None else {"class_labels": self.labels[items]}

    def x0(self, items: Tensor) -> Tensor:
        """The samples."""
        return self.samples[items]


def load_dataset(name: str) -> Dataset | None:
    """A data set by its name in recipes; None where it is not one that Fewstep can load."""
    return Dataset(*load_digits()) if name == "digits" else None
