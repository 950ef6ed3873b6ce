"""Rollout: student samples for the coming phases, made by an engine that holds a copy of it."""

from __future__ import annotations

from typing import Annotated, Literal, final

from pydantic import Field

from fewstep.settings import Settings


@final
class RolloutSettings(Settings):
    """Who makes the student samples that phases of other groups learn from, and when."""

    workers: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="processes that hold a copy of the student and make samples; null: one for "
        "each worker where the student and the fake score are in different groups, else none",
    )
    engine: Literal["student", "pipeline"] = Field(
        "student",
        description="what makes them: the student's own network, or a diffusers pipeline as "
        "`export` writes it",
    )
    schedule: Literal["sync", "async"] = Field(
        "sync",
        description="sync: samples are made when a cycle begins; async: those of the next cycle "
        "while this one trains, by a student that is one cycle older",
    )
    max_staleness: Annotated[int, Field(ge=1)] = Field(
        1, description="async: student updates that samples may be behind; more is an error"
    )
    bucket_mib: Annotated[int, Field(gt=0)] = Field(
        256, description="weights are sent to the workers in portions of this size"
    )
