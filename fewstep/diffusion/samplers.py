"""Samplers: from noise to clean samples along a grid of sigmas.

A sampler calls `predict(x, sigma)` once for each grid entry (Heun: twice for all but the last)
and nothing else. `sigma` is a tensor [] with the grid's exact value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fewstep.diffusion.prediction import Prediction

Predict = Callable[[Tensor, Tensor], Prediction]
Noise = Callable[[int], Tensor]
Transition = Literal["renoise", "euler"]


def sigma_tensor(sigma: float, x: Tensor) -> Tensor:
    """One grid value as a tensor [], in the precision of the samples and on their device."""
    return torch.tensor(sigma, dtype=x.dtype, device=x.device)


def euler_transition(prediction: Prediction, sigma_next: Tensor) -> Tensor:
    """One probability-flow ODE step with the predicted x0 and eps held fixed: like `x`.

    alpha' * x0 + n' * eps: Euler's step for a rectified flow, DDIM (arXiv 2010.02502, eq. 12
    with no noise) for a variance-preserving path, Euler in the noise scale for EDM.
    """
    path = prediction.path
    return path.alpha(sigma_next) * prediction.x0 + path.noise_scale(sigma_next) * prediction.eps


def renoise_transition(prediction: Prediction, sigma_next: Tensor, eps: Tensor) -> Tensor:
    """Noise the predicted clean sample afresh (consistency models, arXiv 2303.01469, alg. 1)."""
    return prediction.path.add_noise(prediction.x0, eps, sigma_next)


def transition(
    kind: Transition, prediction: Prediction, sigma_next: Tensor, noise: Callable[[], Tensor]
) -> Tensor:
    """Go from one grid entry to the next: by the ODE, or with the fresh noise of `noise()`."""
    if kind == "euler":
        return euler_transition(prediction, sigma_next)
    return renoise_transition(prediction, sigma_next, noise())


def sample_few_step(
    predict: Predict,
    x: Tensor,
    sigmas: Sequence[float],
    kind: Transition,
    noise: Noise | None = None,
) -> Tensor:
    """Sample with one network call for each entry of the grid.

    Args:
        predict: the network, conditioned and guided by the caller.
        x: starting point [B, ...] at sigmas[0] (see `Path.prior`).
        sigmas: the grid, from noise downwards; the last prediction's x0 is the result.
        kind: "euler" (the ODE) or "renoise" (fresh noise between steps).
        noise: for "renoise": step index (1 for the second entry) -> standard normal like `x`.

    Raises:
        ValueError: for "renoise" without `noise`.
    """
    if kind == "renoise" and noise is None and len(sigmas) > 1:
        raise ValueError("renoise needs a source of fresh noise")
    for step, sigma in enumerate(sigmas):
        prediction = predict(x, sigma_tensor(sigma, x))
        if step + 1 == len(sigmas):
            return prediction.x0
        fresh = partial(noise, step + 1) if noise is not None else torch.empty(0).clone
        x = transition(kind, prediction, sigma_tensor(sigmas[step + 1], x), fresh)
    raise ValueError("the grid is empty: at least one sigma is needed")


def sample_heun(predict: Predict, x: Tensor, sigmas: Sequence[float]) -> Tensor:
    """Heun's second-order deterministic sampler, as EDM uses it (arXiv 2206.00364): [B, ...].

    Unlike the paper's algorithm 1 it works in the coordinates y = x / (alpha + n) and
    tau = n / (alpha + n), in which every path is the straight line y = (1 - tau) * x0 + tau * eps
    and dy/dtau = eps - x0. The last step, to zero noise, is Euler's, as in the paper. Arguments
    as for `sample_few_step`.
    """
    for step, sigma in enumerate(sigmas):
        here = sigma_tensor(sigma, x)
        first = predict(x, here)
        if step + 1 == len(sigmas):
            return first.x0
        path, there = first.path, sigma_tensor(sigmas[step + 1], x)
        total, total_next = (path.alpha(s) + path.noise_scale(s) for s in (here, there))
        tau, tau_next = path.noise_scale(here) / total, path.noise_scale(there) / total_next
        second = predict(euler_transition(first, there), there)
        slope = (first.velocity + second.velocity) / 2
        x = (x / total + (tau_next - tau) * slope) * total_next
    raise ValueError("the grid is empty: at least one sigma is needed")
