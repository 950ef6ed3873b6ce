"""Who sits where: the processes of a run on a cluster, and their shares of its accelerators."""

from __future__ import annotations

from typing import Annotated, final

from pydantic import Field

from fewstep.settings import Settings

Share = Annotated[float, Field(ge=0, le=1)]


@final
class PlacementSettings(Settings):
    """How the processes of a run on Ray share the accelerators."""

    groups: dict[str, tuple[str, ...]] | None = Field(
        None,
        description="group -> roles, in the order in which the groups train, as in {critic: "
        "[fake_score, teacher_score], actor: [student, student_ema]}; null: one group of all roles",
    )
    accelerator: str | None = Field(
        None,
        description="the cluster's resource of which each worker takes one; null: GPU for cuda, "
        "and for other devices the logical resource 'accelerator'",
    )
    trainer_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.7, description="of each accelerator for the trainer groups together"
    )
    rollout_share: Share = Field(0.25, description="of each accelerator for rollout workers")
    reward_share: Share = Field(0.05, description="of each accelerator, kept free for a reward")
    offload: bool = Field(
        False,
        description="only one group's weights and optimizers are on the accelerators at a time",
    )
    timeout_seconds: Annotated[int, Field(gt=0)] = Field(
        120, description="how long a process may wait for its place before the run is refused"
    )
