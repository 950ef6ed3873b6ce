"""Each role's own optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal, final

import torch
from pydantic import Field, model_validator
from torch import nn

from fewstep.settings import Settings

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


@final
class ScheduleSettings(Settings):
    """The learning rate as a function of a role's successful updates."""

    kind: Literal["constant", "cosine"] = Field("constant", description="after the warm-up")
    warmup_updates: Annotated[int, Field(ge=0)] = Field(
        0, description="linear rise from 0 over this many updates"
    )
    updates: Annotated[int, Field(gt=0)] | None = Field(
        None, description="cosine: updates (warm-up included) until the final value"
    )
    final_fraction: Fraction = Field(0.0, description="cosine: last value over the first")

    @model_validator(mode="after")
    def _check(self) -> ScheduleSettings:
        if (self.kind == "cosine") != (self.updates is not None):
            raise ValueError("'updates' is needed for kind 'cosine', and only there")
        if self.updates is not None and self.updates <= self.warmup_updates:
            raise ValueError(
                f"updates ({self.updates}) must exceed warmup_updates ({self.warmup_updates})"
            )
        return self

    def factor(self, updates_done: int) -> float:
        """What the learning rate is multiplied with for the next update."""
        if updates_done < self.warmup_updates:
            return (updates_done + 1) / (self.warmup_updates + 1)
        if self.updates is None:
            return 1.0
        progress = (updates_done - self.warmup_updates) / (self.updates - self.warmup_updates)
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.final_fraction + (1 - self.final_fraction) * cosine


@final
class OptimizerSettings(Settings):
    """AdamW for one role (Loshchilov & Hutter, arXiv 1711.05101)."""

    lr: Annotated[float, Field(gt=0)] = Field(description="learning rate, before the schedule")
    betas: Annotated[tuple[Beta, Beta], Field(description="DMD2 uses (0, 0.999)")] = (0.0, 0.999)
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="decoupled")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        10.0, description="gradients are scaled down to this norm; null: never"
    )
    schedule: ScheduleSettings = ScheduleSettings()
    unused_parameters: tuple[str, ...] = Field(
        (),
        description="parts of names of parameters that the network never uses: they are left as "
        "they are; any other parameter without a gradient is an error",
    )

    def trains(self, key: str) -> bool:
        """Whether the parameter of that name is trained."""
        return not any(part in key for part in self.unused_parameters)

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """A fused AdamW: one kernel for all tensors, on the CPU too."""
        return torch.optim.AdamW(
            list(parameters),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )
