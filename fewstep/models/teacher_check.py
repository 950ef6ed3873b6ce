"""Whether a teacher is what the recipe says: how well it denoises, read one way or another."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from fewstep.diffusion.prediction import PredictionKind, x0_from
from fewstep.errors import UserError
from fewstep.models.model import Condition, Model

# Low enough that a good teacher is nearly right, high enough that a wrong reading is not.
SIGMA = 0.25
# Another reading must be better by so much before the declared one is refused.
MARGIN = 0.7


@torch.no_grad()
def one_step_errors(
    model: Model,
    network: nn.Module,
    x0: Tensor,
    eps: Tensor,
    condition: Condition,
    sigma: float = SIGMA,
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
) -> float:
    """The one-step error of a teacher; arguments as for `one_step_errors`.

    Raises:
        UserError: with the figures, where its output makes much more sense as another kind.
    """
    errors = one_step_errors(model, network, x0, eps, condition)
    declared, best = model.prediction, min(errors, key=lambda kind: errors[kind])
    if not errors[best] >= MARGIN * errors[declared]:
        raise UserError(
            f"model.prediction: the teacher's output is read as {declared!r}, but one step from "
            f"sigma {SIGMA} then misses the clean samples by {errors[declared]:.1%}; read as "
            f"{best!r} it is {errors[best]:.1%}"
        )
    return errors[declared]
