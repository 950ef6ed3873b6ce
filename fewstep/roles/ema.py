"""The exponential moving average of the student."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, final

import torch
from pydantic import Field
from torch import Tensor

from fewstep.settings import Settings


@final
class EMASettings(Settings):
    """How student_ema follows the student."""

    decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.99, description="ema <- decay * ema + (1 - decay) * student"
    )
    start: Annotated[int, Field(ge=1)] = Field(
        1,
        description="first successful student update after which the average moves; "
        "until then it is the initial student",
    )


@torch.no_grad()
def ema_update(average: Sequence[Tensor], current: Sequence[Tensor], decay: float) -> None:
    """In place, ema <- decay * ema + (1 - decay) * current, for all tensors at once.

    Args:
        average: float32 (or float64) tensors.
        current: tensors of the same shapes, any floating dtype.
        decay: in [0, 1).
    """
    same = [c.to(a.dtype) for a, c in zip(average, current, strict=True)]
    torch._foreach_lerp_(list(average), same, 1 - decay)
