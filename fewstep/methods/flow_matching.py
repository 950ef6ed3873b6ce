"""Flow matching (Lipman et al., arXiv 2210.02747): train or fine-tune a teacher on data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.losses import DenoisingWeighting, denoising_loss
from fewstep.diffusion.timesteps import few_step_grid
from fewstep.methods.method import Method, PhaseLoss, SamplerSpec
from fewstep.methods.options import (
    Guidance,
    SigmaSampling,
    Steps,
    check_grid_start,
    check_guidance,
)
from fewstep.models.model import Condition, Model
from fewstep.roles.role import STUDENT, Roles
from fewstep.settings import Settings


@final
class SamplingSettings(Settings):
    """How the trained teacher is sampled for validation, `sample` and `evaluate`."""

    steps: Steps = Field(50, description="of validation, `sample` and `evaluate`")
    shift: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="of the grid, towards noise; not given: the one that the weights are sampled "
        "with, in their run or by their pipeline",
    )
    solver: Literal["euler", "heun"] = Field(
        "euler", description="euler: one call a step; heun: two, second order"
    )
    guidance: Guidance = 1.0


@final
class FlowMatchingSettings(Settings):
    """Supervised training of a network on data."""

    name: Literal["flow_matching"] = "flow_matching"
    label_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of samples trained without their label, for guidance"
    )
    sigmas: SigmaSampling = SigmaSampling()
    weighting: DenoisingWeighting = Field(
        "native", description="the error learnt from: of what the network predicts, or of x0"
    )
    sampling: SamplingSettings = SamplingSettings()

    @property
    def grid_shift(self) -> float:
        """The shift of the grid that is sampled on."""
        return self.sampling.shift

    @property
    def grid_given(self) -> bool:
        """Whether the recipe says what the grid is, but for its steps."""
        return "shift" in self.sampling.model_fields_set

    def resolved(self, shift: float | None = None) -> FlowMatchingSettings:
        """These settings as they are stored; with a shift if given."""
        if shift is None:
            return self
        sampling = self.sampling.model_copy(update={"shift": shift})
        return self.model_copy(update={"sampling": sampling})

    def build(self) -> Method:
        """The method."""
        return FlowMatching(self)


@final
class FlowMatching(Method):
    """A cycle is one update of the student, which here is the network that learns the data."""

    name: ClassVar[str] = "flow_matching"
    roles = (STUDENT,)
    trained_roles = (STUDENT,)
    needs_data = True

    def __init__(self, settings: FlowMatchingSettings) -> None:
        """`settings`: the recipe's `method` section."""
        self.settings = settings

    @property
    def fake_updates_per_student(self) -> int:
        """None: there is no fake score."""
        return 0

    def check(self, model: Model) -> None:
        """See `Method.check`."""
        check_guidance(model, self.settings.sampling.guidance, "method.sampling.guidance")
        check_grid_start(model, self.sampler().sigmas[0], "the sampler's first sigma")

    def sampler(self, steps: int | None = None, role: str = STUDENT) -> SamplerSpec:
        """See `Method.sampler`."""
        s = self.settings.sampling
        grid = few_step_grid(steps if steps is not None else s.steps, s.shift)
        return SamplerSpec(grid, s.solver, s.guidance)

    def phase_loss(
        self,
        role: str,
        roles: Roles,
        batch: Batch,
        draw: Draw,
        rollout: Draw,
        external: Mapping[str, Tensor],
    ) -> PhaseLoss:
        """Noise the data, drop some labels, predict, compare."""
        if batch.x0 is None:
            raise ValueError("flow_matching trains on data: the batch has none")
        x0, ids = batch.x0, batch.sample_ids
        eps = draw.normal("eps", ids, x0.shape[1:], x0.dtype)
        sigma = self.settings.sigmas.sample(draw, ids, x0.dtype)
        condition = drop_labels(
            roles.model, batch.condition, draw.uniform("dropout", ids) < self.settings.label_dropout
        )
        with roles.use(role) as student:
            prediction = student(roles.model.path.add_noise(x0, eps, sigma), sigma, condition)
        loss = denoising_loss(prediction, x0, eps, self.settings.weighting).mean()
        return PhaseLoss(loss)


def drop_labels(model: Model, condition: Condition, dropped: Tensor) -> Condition:
    """Put the unconditional condition where `dropped` (bool [B]) is true."""
    if not condition or not model.supports_guidance:
        return condition
    none = model.unconditional(condition)
    return {
        key: torch.where(dropped.reshape(-1, *[1] * (value.ndim - 1)), none[key], value)
        for key, value in condition.items()
    }
