"""DMD2, distribution matching without data (Yin et al., arXiv 2405.14867).

The student learns from the difference of two scores of its own noised samples: a frozen teacher
that knows the data, and a fake score that is kept trained on what the student makes. The gradient
is that of DMD (Yin et al., arXiv 2311.18828), whose equations are cited below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.losses import (
    denoising_loss,
    dmd_direction,
    dmd_surrogate,
    replace_nonfinite,
    replace_nonfinite_in_any,
)
from fewstep.diffusion.samplers import sigma_tensor, transition
from fewstep.diffusion.timesteps import few_step_grid
from fewstep.errors import UserError
from fewstep.methods.adversarial import Adversary
from fewstep.methods.dmd2_settings import DMD2Settings
from fewstep.methods.method import Method, PhaseLoss, Rollout, SamplerSpec, TensorSpec
from fewstep.methods.options import check_grid_start, check_guidance
from fewstep.methods.scores import SCORES
from fewstep.models.model import Model
from fewstep.roles.role import DISCRIMINATOR, FAKE_SCORE, STUDENT, TEACHER_SCORE, Roles

LEAST_SCORE_NOISE = 1e-4

SCORE_STEPS = 50
"""Steps of a score network that is sampled, where no other number is asked for."""


@final
@dataclass(frozen=True)
class Simulation:
    """The student's rollout up to the step whose output is used.

    Attributes:
        x: input of the exit step [B, ...], detached.
        sigma: its level, [].
        exit_step: its index in the grid.
        batch: whose samples these are.
    """

    x: Tensor
    sigma: Tensor
    exit_step: int
    batch: Batch


@final
@dataclass(frozen=True)
class Target:
    """What the scores say of the student's samples.

    Attributes:
        direction: [B, ...], detached and finite.
        nonfinite_entries: how many entries of each sample were zeroed, int64 [B].
        adversarial_gradient: of the generator's loss, like `direction`; None without a classifier.
        adversarial_loss: that loss, detached [B].
    """

    direction: Tensor
    nonfinite_entries: Tensor
    adversarial_gradient: Tensor | None = None
    adversarial_loss: Tensor | None = None


@final
class DMD2(Method):
    """Student phases follow the direction; fake_score phases denoise the student's samples.

    With the adversarial head, discriminator phases classify them, or the fake_score phases do.
    """

    name: ClassVar[str] = "dmd2"

    def __init__(self, settings: DMD2Settings) -> None:
        """`settings`: the recipe's `method` section."""
        self.settings = settings
        self.sigmas = settings.grid
        classifier = settings.classifier
        self.adversary = Adversary(classifier) if classifier is not None else None
        # Where it is trained with the fake score, it is a part of that role.
        self.joint = self.adversary is not None and self.adversary.trained_by == FAKE_SCORE
        self._head = (DISCRIMINATOR,) if self.adversary is not None and not self.joint else ()

    @property
    def roles(self) -> tuple[str, ...]:
        """See `Method.roles`."""
        return (STUDENT, FAKE_SCORE, TEACHER_SCORE, *self._head)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """See `Method.trained_roles`."""
        return (STUDENT, FAKE_SCORE, *self._head)

    @property
    def needs_data(self) -> bool:
        """See `Method.needs_data`: for the classifier alone."""
        return self.adversary is not None

    @property
    def trained_on_data(self) -> tuple[str, ...]:
        """See `Method.trained_on_data`."""
        return (self.adversary.trained_by,) if self.adversary is not None else ()

    @property
    def scored_by(self) -> Mapping[str, tuple[str, ...]]:
        """See `Method.scored_by`."""
        return {STUDENT: (FAKE_SCORE, TEACHER_SCORE, *self._head)}

    @property
    def stale_samples(self) -> tuple[str, ...]:
        """See `Method.stale_samples`: who follows a student that moves anyway.

        The direction, though, is that of the very samples.
        """
        return (FAKE_SCORE, *self._head)

    @property
    def fake_updates_per_student(self) -> int:
        """K."""
        return self.settings.fake_updates_per_student

    def check(self, model: Model) -> None:
        """See `Method.check`."""
        check_guidance(model, self.settings.guidance, "method.guidance")
        check_grid_start(model, self.sigmas[0], "method.sigmas[0]")
        least = torch.tensor(self.settings.score_sigmas.minimum, dtype=torch.float64)
        noise = float(model.path.noise_scale(least))
        if noise < LEAST_SCORE_NOISE:
            raise UserError(
                f"method.score_sigmas.minimum: {float(least)} is a noise of {noise:.1g} on this "
                f"model's path, where the two scores differ by rounding alone; raise it until the "
                f"noise is at least {LEAST_SCORE_NOISE:g}"
            )

    def sampler(self, steps: int | None = None, role: str = STUDENT) -> SamplerSpec:
        """The trained grid, or one of another number of steps that it was not trained on.

        The scores are many-step models: an ODE's grid, for the teacher with its guidance.
        """
        s = self.settings
        if role in (TEACHER_SCORE, FAKE_SCORE):
            # From where the student starts: an eps network says nothing of what is all noise.
            first, grid = self.sigmas[0], few_step_grid(steps or SCORE_STEPS, s.shift)
            guidance = s.guidance if role == TEACHER_SCORE else 1.0
            return SamplerSpec(tuple(first * sigma for sigma in grid), "euler", guidance)
        if steps is None or steps == len(self.sigmas):
            return SamplerSpec(self.sigmas, s.transition)
        return SamplerSpec(few_step_grid(steps, s.shift), s.transition)

    def phase_loss(
        self,
        role: str,
        roles: Roles,
        batch: Batch,
        draw: Draw,
        rollout: Draw,
        external: Mapping[str, Tensor],
    ) -> PhaseLoss:
        """One micro-batch of a student, a fake_score or a discriminator phase."""
        if role == STUDENT:
            target = Target(**external) if "direction" in external else None
            return self.student_loss(roles, self.simulate(roles, batch, rollout), draw, target)
        x0 = external.get("x0")
        if x0 is None:
            with torch.no_grad():
                x0 = self.generate(roles, self.simulate(roles, batch, rollout))
        if role == DISCRIMINATOR:
            assert self.adversary is not None
            return self.adversary.classifier_loss(roles, x0, batch, draw)
        return self.fake_score_loss(roles, x0, batch, draw)

    def external_tensors(
        self, role: str, model: Model, dtype: torch.dtype
    ) -> Mapping[str, TensorSpec]:
        """See `Method.external_tensors`."""
        sample = TensorSpec(model.sample_shape, dtype)
        if role != STUDENT:
            return {"x0": sample}
        found = {"direction": sample, "nonfinite_entries": TensorSpec((), torch.int64)}
        if self.adversary is not None:
            found |= {"adversarial_gradient": sample, "adversarial_loss": TensorSpec((), dtype)}
        return found

    def rollout(self, model: Model, batch: Batch, draw: Draw, dtype: torch.dtype) -> Rollout:
        """See `Method.rollout`: the grid up to a random exit (section 4.5)."""
        exit_step = draw.choice("exit", len(self.sigmas))
        used = exit_step + 1 if self.settings.transition == "renoise" else 1
        noise = draw.normal("rollout", batch.sample_ids, (used, *model.sample_shape), dtype)
        sigmas = self.sigmas[: exit_step + 1]
        return Rollout(noise, sigmas, self.settings.transition, batch.condition)

    def score_for(
        self, role: str, roles: Roles, x0: Tensor, batch: Batch, draw: Draw
    ) -> Mapping[str, Tensor]:
        """See `Method.score_for`."""
        found = vars(self.score(roles, x0, batch, draw))
        return {key: value for key, value in found.items() if value is not None}

    @torch.no_grad()
    def simulate(self, roles: Roles, batch: Batch, draw: Draw) -> Simulation:
        """Backward simulation (section 4.5): the student's own steps up to a random exit.

        Starts from the path's noise at sigma = 1, whatever the grid's first entry is, as the
        pipelines of diffusers do.
        """
        rollout = self.rollout(roles.model, batch, draw, roles.dtype)
        noise, sigmas = rollout.noise, rollout.sigmas
        exit_step = len(sigmas) - 1
        x = roles.model.path.prior(noise[:, 0])
        with roles.use(STUDENT) as student:
            for step in range(exit_step):
                prediction = student(x, sigma_tensor(sigmas[step], x), batch.condition)
                fresh = partial(noise.select, 1, step + 1)
                following = sigma_tensor(sigmas[step + 1], x)
                x = transition(self.settings.transition, prediction, following, fresh)
        return Simulation(x, sigma_tensor(sigmas[exit_step], x), exit_step, batch)

    def generate(self, roles: Roles, simulation: Simulation) -> Tensor:
        """The exit step: clean samples [B, ...], with a graph where gradients are enabled."""
        with roles.use(STUDENT) as student:
            return student(simulation.x, simulation.sigma, simulation.batch.condition).x0

    @torch.no_grad()
    def score(self, roles: Roles, x0: Tensor, batch: Batch, draw: Draw) -> Target:
        """Both scores of the samples at one noise, one sigma and one input (DMD, eq. 7).

        And the pull of the classifier, at noise of its own.
        """
        eps = draw.normal("eps", batch.sample_ids, x0.shape[1:], x0.dtype)
        sigma = self.settings.score_sigmas.sample(draw, batch.sample_ids, x0.dtype)
        x = roles.model.path.add_noise(x0, eps, sigma)
        predict = SCORES[self.settings.score_batching]
        x0_fake, x0_real = predict(roles, x, sigma, batch.condition, self.settings.guidance)
        direction = dmd_direction(x0, x0_fake, x0_real)
        if self.adversary is None:
            return Target(*replace_nonfinite(direction))
        gradient, losses = self.adversary.generator_term(roles, x0, batch, draw)
        (direction, gradient), replaced = replace_nonfinite_in_any(direction, gradient)
        return Target(direction, replaced, gradient, losses)

    def student_loss(
        self, roles: Roles, simulation: Simulation, draw: Draw, target: Target | None = None
    ) -> PhaseLoss:
        """The surrogate whose gradient is the direction; the student runs once.

        `target` is given where another group has scored these samples.
        """
        x0 = self.generate(roles, simulation)
        samples = x0.detach()
        if target is None:
            target = self.score(roles, samples, simulation.batch, draw)
        losses, metrics = dmd_surrogate(x0, target.direction), sample_statistics(samples)
        pull, deceived = target.adversarial_gradient, target.adversarial_loss
        if self.adversary is not None and pull is not None and deceived is not None:
            losses = losses + self.adversary.surrogate(x0, pull, deceived)
            metrics["generator_loss"] = deceived.mean()
        return PhaseLoss(
            loss=losses.mean(),
            metrics=metrics,
            outputs={"x0": samples},
            nonfinite_entries=target.nonfinite_entries.sum(),
            entries=samples.numel(),
        )

    def fake_score_loss(self, roles: Roles, x0: Tensor, batch: Batch, draw: Draw) -> PhaseLoss:
        """Denoising of detached student samples (DMD, eq. 6), at sigmas of its own.

        And the classifier's loss, where that is trained with the fake score.
        """
        x0 = x0.detach()
        eps = draw.normal("eps", batch.sample_ids, x0.shape[1:], x0.dtype)
        sigma = self.settings.fake_sigmas.sample(draw, batch.sample_ids, x0.dtype)
        x = roles.model.path.add_noise(x0, eps, sigma)
        judged = None
        if self.adversary is not None and self.joint:
            predict = self.adversary.predict_and_classify
            prediction, judged = predict(roles, x, sigma, x0, batch, draw)
        else:
            with roles.use(FAKE_SCORE) as fake_score:
                prediction = fake_score(x, sigma, batch.condition)
        loss = denoising_loss(prediction, x0, eps, self.settings.fake_weighting).mean()
        if judged is None:
            return PhaseLoss(loss, outputs={"x0": x0})
        metrics = {"denoising_loss": loss.detach(), **judged.metrics}
        return PhaseLoss(loss + judged.loss, metrics, outputs={"x0": x0})


def sample_statistics(x0: Tensor) -> dict[str, Tensor]:
    """Moments of clean samples [B, ...]: their drift shows before the loss does."""
    flat = x0.flatten(1)
    return {
        "sample_mean": flat.mean(),
        "sample_mean_square": (flat * flat).mean(),
        "sample_variance": flat.var(dim=1, unbiased=False).mean(),
    }
