"""What an algorithm tells the engine: its roles, its phases and each phase's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.samplers import Transition
from fewstep.models.model import Model
from fewstep.roles.role import STUDENT, Roles

Solver = Literal["euler", "renoise", "heun"]


@final
@dataclass(frozen=True)
class PhaseLoss:
    """The outcome of one micro-batch of a phase.

    Attributes:
        loss: scalar with a graph: the mean over the micro-batch's samples.
        metrics: detached scalars, means over the samples.
        normalizer: None (samples count equally), or a positive number n: the phase's gradient is
            then sum(n * grad) / sum(n) over micro-batches and ranks.
        outputs: detached student samples [B, ...] that later phases of the cycle may use.
        nonfinite_entries: how many entries were not finite and zeroed, int64 [].
        entries: how many there are; a phase in which none is finite is skipped.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    normalizer: float | Tensor | None = None
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    nonfinite_entries: Tensor | None = None
    entries: int = 0


@final
@dataclass(frozen=True)
class SamplerSpec:
    """How a role's network turns noise into samples; stored with every run and export.

    Attributes:
        sigmas: the grid, as it is used.
        solver: how to go from one sigma to the next.
        guidance: scale w of u + w * (c - u); 1 is no guidance.
    """

    sigmas: tuple[float, ...]
    solver: Solver
    guidance: float = 1.0

    @property
    def steps(self) -> int:
        """Entries of the grid."""
        return len(self.sigmas)

    @property
    def nfe(self) -> int:
        """Network calls for each sample."""
        calls = 2 * self.steps - 1 if self.solver == "heun" else self.steps
        return calls * (1 if self.guidance == 1 else 2)


@final
@dataclass(frozen=True)
class Rollout:
    """Student samples that a phase works on, said so that any engine can make them.

    Attributes:
        noise: standard normal [B, N, ...]: the start, and for "renoise" that of each step after.
        sigmas: the student's grid up to the step whose clean sample is wanted.
        transition: from one of them to the next.
        condition: each entry [B, ...].
    """

    noise: Tensor
    sigmas: tuple[float, ...]
    transition: Transition
    condition: Mapping[str, Tensor]


class TensorSpec(NamedTuple):
    """One tensor of external data: the shape of a sample, and the dtype."""

    shape: Sequence[int]
    dtype: torch.dtype


class Method(ABC):
    """One algorithm of one paper. A new one is one file and one line in `methods.METHODS`.

    What is a property here may be a plain attribute of a method where no setting changes it.

    Attributes:
        name: as in `method.name` of a recipe.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def roles(self) -> tuple[str, ...]:
        """The roles that it needs, without student_ema."""

    @property
    @abstractmethod
    def trained_roles(self) -> tuple[str, ...]:
        """Those that get an optimizer."""

    @property
    @abstractmethod
    def needs_data(self) -> bool:
        """Whether batches must hold clean data."""

    @property
    def trained_on_data(self) -> tuple[str, ...]:
        """The trained roles whose phases look at clean data; by default all, or none."""
        return self.trained_roles if self.needs_data else ()

    @property
    def scored_by(self) -> Mapping[str, tuple[str, ...]]:
        """Trained role -> roles that score its samples, all at once, perhaps in another group."""
        return {}

    @property
    def stale_samples(self) -> tuple[str, ...]:
        """Roles whose phases may learn from samples of a student a few updates old."""
        return ()

    @property
    @abstractmethod
    def fake_updates_per_student(self) -> int:
        """K: rounds of phases in each cycle of the roles that follow the student."""

    @property
    def followers(self) -> tuple[str, ...]:
        """The trained roles that learn from the student's samples, in the order of a round."""
        return tuple(role for role in self.trained_roles if role != STUDENT)

    @abstractmethod
    def check(self, model: Model) -> None:
        """Raise UserError where the model cannot be trained by this method."""

    @abstractmethod
    def sampler(self, steps: int | None = None, role: str = STUDENT) -> SamplerSpec:
        """How a role is sampled; `steps` asks for another grid of the same kind."""

    @abstractmethod
    def phase_loss(
        self,
        role: str,
        roles: Roles,
        batch: Batch,
        draw: Draw,
        rollout: Draw,
        external: Mapping[str, Tensor],
    ) -> PhaseLoss:
        """The loss of one micro-batch; the caller runs it, and its backward, with `role` in use.

        Args:
            role: the one trained.
            roles: all of them.
            batch: the micro-batch.
            draw: random numbers of this phase.
            rollout: random numbers of the student's samples (those of another phase, where
                phases share their samples).
            external: detached tensors [B, ...] that were computed before: student samples of an
                earlier phase, or what `external_tensors` names.
        """

    def external_tensors(
        self, role: str, model: Model, dtype: torch.dtype
    ) -> Mapping[str, TensorSpec]:
        """What a phase of `role` is given where the roles that it needs live elsewhere."""
        return {}

    def rollout(self, model: Model, batch: Batch, draw: Draw, dtype: torch.dtype) -> Rollout:
        """The student samples of a phase: those that it would make by itself, bit for bit.

        Args:
            model: the adapter.
            batch: samples of the phase.
            draw: random numbers of the phase's samples.
            dtype: of the noise.

        Raises:
            ValueError: for methods whose phases use none.
        """
        raise ValueError(f"the phases of {self.name} use no student samples")

    def score_for(
        self, role: str, roles: Roles, x0: Tensor, batch: Batch, draw: Draw
    ) -> Mapping[str, Tensor]:
        """What the roles of `scored_by` say of student samples, for a phase of `role` elsewhere.

        Args:
            role: whose phase it is for.
            roles: those that score, at least.
            x0: the samples [B, ...].
            batch: whose they are.
            draw: random numbers of that phase.

        Raises:
            ValueError: where nothing scores that role's samples.
        """
        raise ValueError(f"{self.name} scores no samples for {role}")


def trained_transition(solver: Solver) -> Transition:
    """The transition of a solver that takes one network call a step.

    Raises:
        ValueError: for "heun".
    """
    if solver == "heun":
        raise ValueError("heun calls the network twice a step")
    return solver
