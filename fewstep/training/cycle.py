"""A cycle: one student phase and K rounds of those that follow it, in a declared order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, final

from pydantic import Field

from fewstep.roles.role import FAKE_SCORE, STUDENT
from fewstep.settings import Settings
from fewstep.training.phase import PhaseRequest


@final
class CycleSettings(Settings):
    """How the phases of a cycle are arranged."""

    order: Literal["student_first", "fake_score_first"] = Field(
        "student_first", description="which role is trained first in a cycle"
    )
    warmup_cycles: Annotated[int, Field(ge=0)] = Field(
        0, description="first cycles that train all but the student"
    )
    fake_batches: Literal["fresh", "reuse_student"] = Field(
        "fresh",
        description="fresh: every fake_score phase makes student samples of its own; "
        "reuse_student: all phases of a cycle share one batch of them",
    )


def plan_cycle(
    cycle: int,
    fake_updates_per_student: int,
    settings: CycleSettings,
    followers: Sequence[str] = (FAKE_SCORE,),
) -> list[PhaseRequest]:
    """The phases of one cycle, in order.

    Args:
        cycle: 1, 2, ...
        fake_updates_per_student: K; 0 for methods without a fake score.
        settings: order, warm-up and sharing.
        followers: the roles that learn from the student's samples, K times, in this order; those
            of a round share their samples.
    """
    shared = settings.fake_batches == "reuse_student"
    phases = [
        PhaseRequest(
            cycle,
            f"{role}/{k}",
            role,
            rollout=STUDENT if shared else f"{followers[0]}/{k}",
            hands_over=not shared and role == followers[0] and len(followers) > 1,
        )
        for k in range(fake_updates_per_student)
        for role in followers
    ]
    if cycle > settings.warmup_cycles or fake_updates_per_student == 0:
        student = PhaseRequest(cycle, STUDENT, STUDENT, rollout=STUDENT)
        phases.insert(0 if settings.order == "student_first" else len(phases), student)
    if shared and len(phases) > 1:
        first = phases[0]
        phases[0] = PhaseRequest(cycle, first.name, first.role, first.rollout, hands_over=True)
    return phases
