"""What a recipe says of DMD2 (`methods.dmd2`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, final

from pydantic import Field, field_validator, model_validator

from fewstep.diffusion.losses import DenoisingWeighting
from fewstep.diffusion.samplers import Transition
from fewstep.diffusion.timesteps import few_step_grid
from fewstep.methods.adversarial import AdversarialSettings
from fewstep.methods.method import Method
from fewstep.methods.options import Guidance, SigmaSampling
from fewstep.methods.scores import ScoreBatching
from fewstep.settings import Settings


@final
class DMD2Settings(Settings):
    """Distribution matching of a student of one to eight steps."""

    name: Literal["dmd2"] = "dmd2"
    steps: Annotated[int, Field(ge=1, le=8)] = Field(4, description="steps of the student")
    shift: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="of the student's grid; not given: the one that the teacher is sampled with, "
        "in its run or by its pipeline",
    )
    sigmas: tuple[Annotated[float, Field(gt=0, le=1)], ...] | None = Field(
        None, description="the grid itself; null: made from steps and shift"
    )
    transition: Transition = Field(
        "renoise", description="between steps: fresh noise, or the ODE (euler)"
    )
    fake_updates_per_student: Annotated[int, Field(ge=1)] = Field(
        5, description="K: fake_score updates for each student update"
    )
    guidance: Guidance = Field(1.0, description="of the teacher, w of u + w * (c - u)")
    score_sigmas: SigmaSampling = Field(
        SigmaSampling(minimum=0.02, maximum=0.98),
        description="noise levels at which the student's samples are scored",
    )
    score_batching: ScoreBatching = Field(
        "separate",
        description="network calls of the scores: one for each, or one for all on a batch of two "
        "or three times the samples (fused; for storage shared_base)",
    )
    fake_sigmas: SigmaSampling = Field(
        SigmaSampling(), description="noise levels at which the fake score is trained"
    )
    fake_weighting: DenoisingWeighting = Field(
        "native", description="error that the fake score learns from: of what it predicts, or x0"
    )
    adversarial: AdversarialSettings | None = Field(
        None, description="a classifier that knows real data; null: none"
    )

    @field_validator("score_sigmas", mode="before")
    @classmethod
    def _keep_score_range(cls, given: object) -> object:
        """A recipe that sets part of `score_sigmas` keeps DMD's range in the rest."""
        if isinstance(given, dict):
            return {"minimum": 0.02, "maximum": 0.98, **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> DMD2Settings:
        sigmas = self.grid
        if len(sigmas) != self.steps:
            raise ValueError(
                f"steps is {self.steps}, but sigmas has {len(sigmas)} entries; set "
                f"method.sigmas=null to make the grid from steps and shift"
            )
        if any(a <= b for a, b in pairwise(sigmas)):
            raise ValueError(f"sigmas must fall from noise to data, got {list(sigmas)}")
        return self

    @property
    def grid(self) -> tuple[float, ...]:
        """The student's sigmas: the only grid that training, sampling and export use."""
        return self.sigmas if self.sigmas is not None else few_step_grid(self.steps, self.shift)

    @property
    def classifier(self) -> AdversarialSettings | None:
        """The adversarial head, where there is one and its weight does not turn it off."""
        head = self.adversarial
        return head if head is not None and head.generator_weight > 0 else None

    @property
    def grid_shift(self) -> float:
        """The shift of the grid."""
        return self.shift

    @property
    def grid_given(self) -> bool:
        """Whether the recipe says what the grid is, but for its steps."""
        return self.sigmas is not None or "shift" in self.model_fields_set

    def resolved(self, shift: float | None = None) -> DMD2Settings:
        """These settings with the grid written out, as they are stored; with a shift if given."""
        settings = self if shift is None else self.model_copy(update={"shift": shift})
        return settings.model_copy(update={"sigmas": settings.grid})

    def build(self) -> Method:
        """The method."""
        from fewstep.methods.dmd2 import DMD2  # it takes these settings

        return DMD2(self)
