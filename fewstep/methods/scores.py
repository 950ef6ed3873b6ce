"""The two scores of distribution matching at one input: fake score and guided teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fewstep.diffusion.guidance import guide
from fewstep.models.model import Condition
from fewstep.roles.role import FAKE_SCORE, TEACHER_SCORE, Roles

ScoreBatching = Literal["separate", "fused"]


def predict_separately(
    roles: Roles, x: Tensor, sigma: Tensor, condition: Condition, guidance: float
) -> tuple[Tensor, Tensor]:
    """A network call for each prediction.

    Args:
        roles: fake score and teacher.
        x: noised samples [B, ...].
        sigma: their levels [B].
        condition: entries [B, ...].
        guidance: the teacher's scale w of u + w * (c - u).

    Returns:
        The clean samples [B, ...] by the fake score, and by the teacher.
    """
    with roles.use(FAKE_SCORE) as fake_score:
        x0_fake = fake_score(x, sigma, condition).x0
    with roles.use(TEACHER_SCORE) as teacher:
        x0_real = teacher.guided(x, sigma, condition, guidance).x0
    return x0_fake, x0_real


def predict_fused(
    roles: Roles, x: Tensor, sigma: Tensor, condition: Condition, guidance: float
) -> tuple[Tensor, Tensor]:
    """The same from one network call: a sharded base is gathered once, not three times."""
    names, conditions = [FAKE_SCORE, TEACHER_SCORE], [condition, condition]
    if guidance != 1:
        names.append(TEACHER_SCORE)
        conditions.append(roles.model.unconditional(condition))
    parts = len(names)
    joined = {key: torch.cat([c[key] for c in conditions]) for key in condition}
    with roles.use_each(names, len(x)) as scores:
        x0 = scores(torch.cat([x] * parts), torch.cat([sigma] * parts), joined).x0
    x0_fake, x0_real, *unconditional = x0.chunk(parts)
    if unconditional:
        x0_real = guide(x0_real, unconditional[0], guidance)
    return x0_fake, x0_real


SCORES: Mapping[ScoreBatching, Callable[..., tuple[Tensor, Tensor]]] = {
    "separate": predict_separately,
    "fused": predict_fused,
}
