"""Noising paths: how a clean sample becomes noise as sigma goes from 0 to 1.

Every path is written `x_sigma = alpha(sigma) * x0 + noise_scale(sigma) * eps`, with data at
sigma = 0 and noise at sigma = 1, so that one sigma means the same thing for every role.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor


def expand_to(value: Tensor, x: Tensor) -> Tensor:
    """Reshape a per-sample value so that it multiplies a batch.

    Args:
        value: shape [B] or [].
        x: shape [B, ...], whose number of dimensions is taken.

    Returns:
        A view of `value`, [B, 1, ..., 1] or [].
    """
    return value.reshape(value.shape + (1,) * (x.ndim - 1)) if value.ndim == 1 else value


class Path(ABC):
    """A noising path, given by two coefficients of sigma in [0, 1]."""

    @abstractmethod
    def alpha(self, sigma: Tensor) -> Tensor:
        """Coefficient of the clean sample; same shape and dtype as `sigma`."""

    @abstractmethod
    def noise_scale(self, sigma: Tensor) -> Tensor:
        """Coefficient of the noise; same shape and dtype as `sigma`."""

    @abstractmethod
    def timestep(self, sigma: Tensor) -> Tensor:
        """What the network is told about the noise level; same shape and dtype as `sigma`."""

    @final
    def add_noise(self, x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
        """Noise clean samples to level sigma; at sigma = 0 the result equals the input exactly.

        Args:
            x0: clean samples [B, ...].
            eps: standard normal noise, like `x0`.
            sigma: [B] or [], in [0, 1].
        """
        a = expand_to(self.alpha(sigma), x0)
        n = expand_to(self.noise_scale(sigma), x0)
        return a * x0 + n * eps

    @final
    def prior(self, eps: Tensor) -> Tensor:
        """The sampler's starting point at sigma = 1 from standard normal noise, like `eps`."""
        return self.noise_scale(eps.new_ones(())) * eps


@final
@dataclass(frozen=True)
class RectifiedFlow(Path):
    """Straight lines between data and noise (Liu et al., arXiv 2209.03003, eq. 1).

    `timestep_scale` is what the network was trained on: 1000 for diffusers' networks.
    """

    timestep_scale: float = 1000.0

    def alpha(self, sigma: Tensor) -> Tensor:
        """1 - sigma."""
        return 1 - sigma

    def noise_scale(self, sigma: Tensor) -> Tensor:
        """Sigma itself."""
        return sigma

    def timestep(self, sigma: Tensor) -> Tensor:
        """Sigma times the network's scale."""
        return sigma * self.timestep_scale


@lru_cache(maxsize=16)
def _ddpm_log_alpha_bar(
    train_timesteps: int, beta_start: float, beta_end: float, schedule: str
) -> Tensor:
    """Logarithm of cumulative alphas, float64 [T + 1], entry 0 (no noise) included."""
    if schedule == "linear":
        betas = torch.linspace(beta_start, beta_end, train_timesteps, dtype=torch.float64)
    elif schedule == "scaled_linear":
        roots = torch.linspace(beta_start**0.5, beta_end**0.5, train_timesteps, dtype=torch.float64)
        betas = roots**2
    else:
        raise ValueError(f"beta schedule {schedule!r}: use 'linear' or 'scaled_linear'")
    log_alpha_bar = torch.log1p(-betas).cumsum(0)
    return torch.cat([log_alpha_bar.new_zeros(1), log_alpha_bar])


@final
@dataclass(frozen=True)
class VariancePreserving(Path):
    """DDPM's path (Ho et al., arXiv 2006.11239, eq. 4) as a continuous function of sigma.

    sigma = (t + 1) / T for DDPM's integer timestep t, where the coefficients equal its table
    exactly; between two entries log(alpha_bar) is linear, and sigma = 0 is the clean sample.
    Nothing is rounded to a timestep.
    """

    train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"

    def _log_alpha_bar(self, sigma: Tensor) -> Tensor:
        table = _ddpm_log_alpha_bar(
            self.train_timesteps, self.beta_start, self.beta_end, self.beta_schedule
        ).to(sigma.device)
        position = sigma.double() * self.train_timesteps
        # Sigmas of table entries land within their own rounding of a whole position: snap those,
        # so that the entry is met exactly. Relative, so that no sigma but 0 becomes clean.
        nearest = position.round()
        rounding = min(torch.finfo(sigma.dtype).eps, 2.0**-23) * position
        position = torch.where((position - nearest).abs() <= rounding, nearest, position)
        low = position.floor().clamp(0, self.train_timesteps - 1).long()
        weight = position - low
        return torch.lerp(table[low], table[low + 1], weight)

    def alpha(self, sigma: Tensor) -> Tensor:
        """sqrt(alpha_bar)."""
        return torch.exp(0.5 * self._log_alpha_bar(sigma)).to(sigma.dtype)

    def noise_scale(self, sigma: Tensor) -> Tensor:
        """sqrt(1 - alpha_bar)."""
        return torch.sqrt(-torch.expm1(self._log_alpha_bar(sigma))).to(sigma.dtype)

    def timestep(self, sigma: Tensor) -> Tensor:
        """DDPM's timestep t = sigma * T - 1, not rounded, at least 0."""
        return (sigma * self.train_timesteps - 1).clamp(min=0)


@final
@dataclass(frozen=True)
class EDM(Path):
    """Variance-exploding path of EDM (Karras et al., arXiv 2206.00364, eq. 5).

    alpha = 1 and noise_scale = noise_max * sigma**rho: equal steps in sigma are EDM's grid,
    continued to zero noise.
    """

    noise_max: float = 80.0
    rho: float = 7.0

    def alpha(self, sigma: Tensor) -> Tensor:
        """One: clean samples are not scaled."""
        return torch.ones_like(sigma)

    def noise_scale(self, sigma: Tensor) -> Tensor:
        """EDM's own sigma, in units of the data."""
        return self.noise_max * sigma**self.rho

    def sigma(self, noise_scale: Tensor) -> Tensor:
        """The inverse of `noise_scale`."""
        return (noise_scale / self.noise_max) ** (1 / self.rho)

    def timestep(self, sigma: Tensor) -> Tensor:
        """c_noise = log(noise_scale) / 4 (EDM, table 1)."""
        return torch.log(self.noise_scale(sigma)) / 4
