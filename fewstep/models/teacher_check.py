"""Whether a teacher is what the recipe says: how well it denoises, read one way or another."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from fewstep.diffusion.prediction import PredictionKind, x0_from
from fewstep.errors import UserError
from fewstep.models.model import Condition, Model

# Noise at which a teacher is tried. The lower tells most readings apart; eps from v, the higher.
LEVELS = (0.25, 0.5)
# At both levels the same other reading must be better, at one of them by this much, before the
# declared one is refused: a teacher that knows little is often read a little better another way.
MARGIN = 0.7


@torch.no_grad()
def one_step_errors(
    model: Model,
    network: nn.Module,
    x0: Tensor,
    eps: Tensor,
    condition: Condition,
    sigma: float,
) -> dict[PredictionKind, float]:
    """How far one network call is from the clean sample, for each reading of its output.

    Args:
        model: the adapter.
        network: the teacher.
        x0: clean samples [B, ...], as the network sees them: encoded, where it is on latents.
        eps: noise, like `x0`.
        condition: of the samples.
        sigma: level of the noise, in (0, 1).

    Returns:
        Root mean square of x0_hat - x0, as a share of that of x0.
    """
    levels = torch.full((len(x0),), sigma, device=x0.device, dtype=x0.dtype)
    x = model.path.add_noise(x0, eps, levels)
    output = model.forward(network, x, levels, condition).to(x0.dtype)
    size = x0.square().mean().sqrt()
    return {
        kind: float(
            (x0_from(kind, output, x, levels, model.path) - x0).square().mean().sqrt() / size
        )
        for kind in get_args(PredictionKind)
    }


def check_prediction(
    model: Model, network: nn.Module, x0: Tensor, eps: Tensor, condition: Condition
) -> None:
    """Try a teacher at `LEVELS`; arguments as for `one_step_errors`.

    Raises:
        UserError: with the figures, where its output makes much more sense as another kind.
    """
    tried = [one_step_errors(model, network, x0, eps, condition, sigma) for sigma in LEVELS]
    declared = model.prediction
    best, *others = {min(errors, key=lambda kind: errors[kind]) for errors in tried}
    clear = any(errors[best] < MARGIN * errors[declared] for errors in tried)
    if others or not clear:
        return
    figures = "; ".join(
        f"one step from sigma {sigma} then misses the clean samples by {errors[declared]:.1%}, "
        f"and read as {best!r} by {errors[best]:.1%}"
        for sigma, errors in zip(LEVELS, tried, strict=True)
    )
    raise UserError(f"model.prediction: the teacher's output is read as {declared!r}: {figures}")
