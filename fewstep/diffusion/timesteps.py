"""Sigma grids for few-step sampling and samplers of sigma for training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Move sigmas towards noise: shift * sigma / (1 + (shift - 1) * sigma).

    SD3 (arXiv 2403.03206, eq. 23). Any shape; shift 1 is the identity. The denominator is
    written so that 1 stays exactly 1.
    """
    return shift * sigma / (shift * sigma + (1 - sigma))


def few_step_grid(steps: int, shift: float = 1.0) -> tuple[float, ...]:
    """The sigmas at which a sampler of `steps` calls its network, from 1 downwards, shifted once.

    linspace(1, 0, steps + 1) without its last entry, shifted. Computed in float64, so the same
    numbers serve training, validation, sampling and export.

    Raises:
        ValueError: for fewer than one step or a shift that is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}: at least 1 is needed")
    if not shift > 0:
        raise ValueError(f"shift is {shift}: it must be positive")
    linear = torch.linspace(1, 0, steps + 1, dtype=torch.float64, device="cpu")[:-1]
    return tuple(shift_sigma(linear, shift).tolist())


def shift_of_grid(sigmas: Sequence[float]) -> float | None:
    """The shift s of which `few_step_grid` makes these sigmas; None where none does.

    A single step is the same with any: 1.
    """
    shift, steps = 1.0, len(sigmas)
    if steps > 1 and 0 < sigmas[1] < 1:
        # It multiplies sigma / (1 - sigma), which is steps - 1 for the second of equal steps.
        shift = float(f"{sigmas[1] / (1 - sigmas[1]) / (steps - 1):.12g}")
    pairs = zip(few_step_grid(steps, shift), sigmas, strict=True)
    return shift if all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs) else None


def uniform_sigma(
    uniform: Tensor, shift: float = 1.0, sigma_min: float = 0.0, sigma_max: float = 1.0
) -> Tensor:
    """Score-time sampler of DMD: uniform, shifted, clamped to [sigma_min, sigma_max].

    Args:
        uniform: [B], uniform on (0, 1).
        shift: see `shift_sigma`.
        sigma_min: least value.
        sigma_max: greatest value.
    """
    return shift_sigma(uniform, shift).clamp(sigma_min, sigma_max)


def logit_normal_sigma(
    normal: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    shift: float = 1.0,
    sigma_min: float = 0.0,
    sigma_max: float = 1.0,
) -> Tensor:
    """Training sampler of SD3 (arXiv 2403.03206, section 3.1), shifted and clamped.

    Args:
        normal: [B], standard normal.
        mean: of the logit.
        std: of the logit.
        shift: see `shift_sigma`.
        sigma_min: least value.
        sigma_max: greatest value.
    """
    return shift_sigma(torch.sigmoid(mean + std * normal), shift).clamp(sigma_min, sigma_max)
