"""Classifier-free guidance (Ho & Salimans, arXiv 2207.12598) in one form: u + w * (c - u)."""

from __future__ import annotations

from torch import Tensor


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Guided prediction u + w * (c - u), elementwise on [B, ...]; w = 1 leaves the conditional."""
    return unconditional + scale * (conditional - unconditional)


def scale_from_excess(excess: float) -> float:
    """Our scale for papers that write c + w * (c - u): w + 1."""
    return excess + 1.0
