"""Options that several methods share."""

from __future__ import annotations

from typing import Annotated, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fewstep.diffusion.draw import Draw
from fewstep.diffusion.timesteps import logit_normal_sigma, uniform_sigma
from fewstep.errors import UserError
from fewstep.models.model import Model
from fewstep.settings import Settings

Steps = Annotated[int, Field(ge=1, le=1000)]
Guidance = Annotated[float, Field(ge=0, description="w of u + w * (c - u); 1: no guidance")]
Sigma = Annotated[float, Field(ge=0, le=1)]


@final
class SigmaSampling(Settings):
    """How the noise levels of a training loss are drawn, one for each sample."""

    kind: Literal["uniform", "logit_normal"] = Field("uniform", description="of distribution")
    shift: Annotated[float, Field(gt=0)] = Field(1.0, description="above 1: towards noise")
    minimum: Sigma = Field(0.0, description="values are clamped to this and above")
    maximum: Sigma = Field(1.0, description="values are clamped to this and below")
    mean: float = Field(0.0, description="logit_normal: mean of the logit")
    std: Annotated[float, Field(gt=0)] = Field(1.0, description="logit_normal: its deviation")

    @model_validator(mode="after")
    def _check(self) -> SigmaSampling:
        if not self.minimum < self.maximum:
            raise ValueError(f"minimum ({self.minimum}) must be below maximum ({self.maximum})")
        return self

    def sample(
        self,
        draw: Draw,
        sample_ids: Tensor,
        dtype: torch.dtype = torch.float32,
        stream: str = "sigma",
    ) -> Tensor:
        """Sigmas [B] of the phase, from one of its streams."""
        if self.kind == "uniform":
            uniform = draw.uniform(stream, sample_ids, dtype)
            return uniform_sigma(uniform, self.shift, self.minimum, self.maximum)
        normal = draw.normal(stream, sample_ids, (), dtype)
        return logit_normal_sigma(
            normal, self.mean, self.std, self.shift, self.minimum, self.maximum
        )


def check_grid_start(model: Model, first_sigma: float, key: str) -> None:
    """Raise UserError where a network cannot be sampled from `first_sigma`; `key` sets that."""
    alpha = model.path.alpha(torch.tensor(first_sigma, dtype=torch.float64))
    if model.prediction == "eps" and float(alpha) == 0:
        raise UserError(
            f"model.prediction is 'eps', which says nothing of the sample where it is pure noise, "
            f"as at {key} = {first_sigma}; start the grid lower, or take a network that predicts "
            f"something else"
        )


def check_guidance(model: Model, scale: float, key: str) -> None:
    """Raise UserError where a model cannot be guided by this scale."""
    if scale == 1:
        return
    if model.guidance_distilled:
        raise UserError(
            f"{key} is {scale}, but model.guidance_distilled is true: guidance is in the "
            f"teacher's weights, and guiding it again would burn the samples; use 1"
        )
    if not model.supports_guidance:
        raise UserError(
            f"{key} is {scale}, but the teacher is unconditional: there is nothing to guide "
            f"away from; use 1"
        )
