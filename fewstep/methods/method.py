"""What an algorithm tells the engine: its roles, its phases and each phase's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, final

from torch import Tensor

from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.samplers import Transition
from fewstep.models.model import Model
from fewstep.roles.role import Roles

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
        outputs: detached tensors [B, ...] that later phases of the cycle may use.
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


class Method(ABC):
    """One algorithm of one paper. A new one is one file and one line in `methods.METHODS`.

    Attributes:
        name: as in `method.name` of a recipe.
        roles: the roles that it needs, without student_ema.
        trained_roles: those that get an optimizer.
        needs_data: whether batches must hold clean data.
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    trained_roles: ClassVar[tuple[str, ...]]
    needs_data: ClassVar[bool]

    @property
    @abstractmethod
    def fake_updates_per_student(self) -> int:
        """K: fake_score phases in each cycle."""

    @abstractmethod
    def check(self, model: Model) -> None:
        """Raise UserError where the model cannot be trained by this method."""

    @abstractmethod
    def sampler(self, steps: int | None = None) -> SamplerSpec:
        """How the student is sampled; `steps` asks for another grid of the same kind."""

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
            external: detached tensors [B, ...] from earlier phases of the cycle.
        """


def trained_transition(solver: Solver) -> Transition:
    """The transition of a solver that takes one network call a step.

    Raises:
        ValueError: for "heun".
    """
    if solver == "heun":
        raise ValueError("heun calls the network twice a step")
    return solver
