"""Losses of distribution matching distillation, each per sample so that a caller can reduce."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fewstep.diffusion.paths import expand_to
from fewstep.diffusion.prediction import Prediction, training_target

DenoisingWeighting = Literal["native", "x0", "x0_edm"]


def mean_per_sample(x: Tensor) -> Tensor:
    """Mean over all but the first dimension: [B, ...] -> [B]."""
    return x.flatten(1).mean(1)


def dmd_direction(x0: Tensor, x0_fake: Tensor, x0_real: Tensor, floor: float = 1e-8) -> Tensor:
    """The normalised direction from the fake to the real score's clean sample.

    DMD (arXiv 2311.18828, eq. 7 and 8): g = (x0_fake - x0_real) / mean |x0 - x0_real|, the mean
    over each sample's own entries.

    Args:
        x0: detached student samples [B, ...].
        x0_fake: clean samples of the fake score at a noised `x0`, like `x0`.
        x0_real: the (guided) teacher's at the very same input, like `x0`.
        floor: least value of the normaliser.
    """
    scale = mean_per_sample((x0 - x0_real).abs()).clamp(min=floor)
    return (x0_fake - x0_real) / expand_to(scale, x0)


def dmd_surrogate(x0: Tensor, direction: Tensor) -> Tensor:
    """A loss whose gradient with respect to x0 is the direction over the number of entries.

    0.5 * mean (x0 - stop(x0 - g))^2 per sample (DMD2, arXiv 2405.14867, reference code): [B].
    """
    target = (x0 - direction).detach()
    return 0.5 * mean_per_sample((x0 - target) ** 2)


def replace_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the entries that are NaN or infinite.

    Returns:
        The cleaned tensor, and how many entries of each sample were replaced: int64 [B].
    """
    finite = torch.isfinite(x)
    return torch.where(finite, x, torch.zeros_like(x)), (~finite).flatten(1).sum(1)


def replace_nonfinite_in_any(*tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Zero in all of them the entries that are NaN or infinite in any.

    Args:
        tensors: of the same shape [B, ...], to be added up.

    Returns:
        The cleaned tensors, and how many entries of each sample were replaced: int64 [B].
    """
    finite = torch.stack([torch.isfinite(x) for x in tensors]).all(0)
    cleaned = [torch.where(finite, x, torch.zeros_like(x)) for x in tensors]
    return cleaned, (~finite).flatten(1).sum(1)


def denoising_loss(
    prediction: Prediction,
    x0: Tensor,
    eps: Tensor,
    weighting: DenoisingWeighting = "native",
    sigma_data: float = 0.5,
) -> Tensor:
    """Denoising score matching on known clean samples and noise: [B].

    Args:
        prediction: the network's, at alpha * x0 + n * eps.
        x0: clean samples [B, ...], no gradient.
        eps: the noise, like `x0`.
        weighting: "native" is the mean square error of what the network predicts (eps-MSE for
            an eps network: DDPM, arXiv 2006.11239, eq. 14; velocity-MSE for a flow); "x0" that
            of the clean sample; "x0_edm" the same times 1/n^2 + 1/sigma_data^2 with the
            noise-to-signal ratio n (EDM, arXiv 2206.00364, section 5).
        sigma_data: standard deviation of the data, for "x0_edm".
    """
    if weighting == "native":
        target = training_target(prediction.kind, x0, eps, prediction.sigma, prediction.path)
        return mean_per_sample((prediction.output - target) ** 2)
    error = mean_per_sample((prediction.x0 - x0) ** 2)
    if weighting == "x0":
        return error
    sigma = prediction.sigma.to(x0.dtype)
    ratio = prediction.path.noise_scale(sigma) / prediction.path.alpha(sigma).clamp(min=1e-6)
    return error * (ratio.clamp(min=1e-6) ** -2 + sigma_data**-2)
