"""Tensors on their way through Ray's object store: as NumPy arrays, which it does not copy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """A tensor of any dtype: its bytes as a NumPy array uint8 [N], its dtype and shape."""

    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]


class Portion(NamedTuple):
    """Some of a student's weights, or of its average's.

    Attributes:
        version: successful updates that the student has seen.
        tensors: by canonical name.
    """

    version: int
    tensors: Mapping[str, Packed]


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Packed]:
    """Contiguous tensors in main memory, on the same memory, for Ray to send."""
    return {
        name: Packed(t.detach().reshape(-1).view(torch.uint8).numpy(), t.dtype, tuple(t.shape))
        for name, t in tensors.items()
    }


def unpack(packed: Mapping[str, Packed]) -> dict[str, Tensor]:
    """The tensors again, to be read only: they lie in the store's own memory."""
    with warnings.catch_warnings():
        # Nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: torch.from_numpy(p.data).view(p.dtype).reshape(p.shape)
            for name, p in packed.items()
        }
