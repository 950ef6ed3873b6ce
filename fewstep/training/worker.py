"""A worker: runs phases on the roles of this process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, final

import torch
from pydantic import Field
from torch import Tensor

from fewstep.data.batches import Batch, BatchSource
from fewstep.diffusion.draw import Draw
from fewstep.errors import TrainingError, UserError
from fewstep.methods.method import Method, PhaseLoss
from fewstep.parallel.ranks import Ranks
from fewstep.parallel.sharding import Replicated, Sharding
from fewstep.roles.role import STUDENT, Role, Roles, gradients_of
from fewstep.settings import Settings
from fewstep.training.phase import PhaseRequest, PhaseResult
from fewstep.training.reduction import (
    MicroBatch,
    check_normalizers,
    concatenate,
    local_sums,
    micro_batches,
    phase_values,
)
from fewstep.training.state import empty_state, load_state_dict, state_dict

Positive = Annotated[int, Field(gt=0)]


@final
class TrainSettings(Settings):
    """How long and in what portions to train."""

    cycles: Positive = Field(description="cycles in all, fake-only warm-up included")
    batch_size: Positive = Field(64, description="samples of each phase")
    micro_batch_size: Positive | None = Field(
        None, description="samples held in memory at once; null: the whole batch"
    )
    max_skipped_in_a_row: Positive = Field(
        100, description="skipped updates of one role in a row that end the run"
    )


@final
@dataclass(frozen=True)
class Kept:
    """Student samples of a phase, kept for later ones of its cycle: each [b, ...]."""

    cycle: int
    rollout: str
    outputs: Mapping[str, Tensor]


@final
@dataclass
class Worker:
    """Holds roles and runs phases on them; one on every rank.

    Attributes:
        seed: of all draws.
        settings: batch sizes and limits.
        method: computes each phase's loss.
        roles: the networks and optimizers.
        batches: where samples come from.
        sharding: how the networks are spread over the ranks.
    """

    seed: int
    settings: TrainSettings
    method: Method
    roles: Roles
    batches: BatchSource
    sharding: Sharding = field(default_factory=Replicated)
    _kept: Kept | None = field(default=None, init=False, repr=False)

    @property
    def ranks(self) -> Ranks:
        """All ranks of the run."""
        return self.sharding.ranks

    def run_phases(self, requests: Sequence[PhaseRequest]) -> list[PhaseResult]:
        """See `Executor.run_phases`."""
        return [self.run_phase(request) for request in requests]

    def run_phase(self, request: PhaseRequest) -> PhaseResult:
        """Gradients of all micro-batches, checks, and at most one update of the role.

        Raises:
            TrainingError: for a broken gradient invariant, mixed or bad normalizers, too many
                skipped updates in a row, or, in a run of several ranks, anything else, with
                rank, cycle and role.
        """
        with self.placing_errors(request):
            return self._run_phase(request)

    @contextmanager
    def placing_errors(self, request: PhaseRequest) -> Iterator[None]:
        """Say where an error was, in a run of several ranks."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not self.ranks.grouped:
                raise
            kind = "" if isinstance(error, TrainingError) else f"{type(error).__name__}: "
            raise TrainingError(
                f"rank {self.ranks.rank}, cycle {request.cycle}, phase {request.name} (role "
                f"{request.role}): {kind}{error}"
            ) from error

    def _run_phase(self, request: PhaseRequest) -> PhaseResult:
        role = self.roles[request.role]
        rollout = Draw(self.seed, request.cycle, request.rollout)
        size, mine = self.settings.batch_size, self.ranks.share(self.settings.batch_size)
        batch = self.batches.batch(rollout, size, mine)
        external = self._external(request)
        self._clear_gradients(role)
        parts = self._micro_batches()
        losses = []
        for part, rows in parts:
            with self.sharding.accumulating(self.roles.storage, role.name, part is parts[-1][0]):
                loss = self._backward(request, batch, external, rows, rollout, part.count)
                losses.append((loss, part))
        # Before they are reduced: ranks that have others would average different tensors.
        self.roles.check_gradients(role.name, self.sharding.zeros_for_none)
        self.sharding.reduce(gradients(role))
        learning_rate = role.learning_rate
        values = self._reduce(role, losses)
        updated = self._update(role, values)
        self._clear_gradients(role)
        values |= {"lr": learning_rate, "updates": role.successful, "skipped": role.skipped}
        if request.hands_over:
            outputs = concatenate([(loss.outputs, part) for loss, part in losses])
            self._kept = Kept(request.cycle, request.rollout, outputs)
        return PhaseResult(replace(request, external={}), updated, role.attempted, values)

    def score(self, request: PhaseRequest) -> dict[str, Tensor]:
        """What roles of this worker say of student samples, for a phase of another group.

        Args:
            request: that phase; its external "x0" are this rank's samples [b, ...].

        Returns:
            What `Method.external_tensors` names, for this rank's samples: each [b, ...].
        """
        with self.placing_errors(request):
            mine = self.ranks.share(self.settings.batch_size)
            rollout = Draw(self.seed, request.cycle, request.rollout)
            batch = self.batches.batch(rollout, self.settings.batch_size, mine)
            draw, x0 = Draw(self.seed, request.cycle, request.name), request.external["x0"]
            found = []
            for part, rows in self._micro_batches():
                some = batch.rows(rows.start, rows.stop)
                scores = self.method.score_for(request.role, self.roles, x0[rows], some, draw)
                found.append((scores, part))
            return concatenate(found)

    def _micro_batches(self) -> list[tuple[MicroBatch, slice]]:
        """This rank's portions of a batch, and where they are in its own rows."""
        size = self.settings.batch_size
        first = self.ranks.share(size).start
        return [
            (part, slice(part.rows.start - first, part.rows.stop - first))
            for part in micro_batches(size, self.ranks, self.settings.micro_batch_size)
        ]

    def _external(self, request: PhaseRequest) -> Mapping[str, Tensor]:
        """What was computed before for the phase: elsewhere, or here by an earlier phase."""
        kept = self._kept
        shared = kept is not None and (kept.cycle, kept.rollout) == (request.cycle, request.rollout)
        return {**(kept.outputs if kept is not None and shared else {}), **request.external}

    def _backward(
        self,
        request: PhaseRequest,
        batch: Batch,
        given: Mapping[str, Tensor],
        rows: slice,
        rollout: Draw,
        count: int,
    ) -> PhaseLoss:
        """Add a micro-batch's gradient, weighted, to the role's; the loss without its graph.

        Args:
            request: the phase.
            batch: this rank's samples.
            given: what was computed before for them.
            rows: those of the micro-batch.
            rollout: random numbers of the student's samples.
            count: how many of them count: all, or none.
        """
        draw = Draw(self.seed, request.cycle, request.name)
        external = {key: value[rows] for key, value in given.items()}
        part = batch.rows(rows.start, rows.stop)
        with self.roles.use(request.role):
            phase_loss = self.method.phase_loss(
                request.role, self.roles, part, draw, rollout, external
            )
            weight: float | Tensor = count / self.settings.batch_size
            if phase_loss.normalizer is not None:
                weight = phase_loss.normalizer if count else 0.0
            # Over ranks the mean is taken; the sum is wanted. Under the role's own adapter:
            # checkpointed layers run forward again here.
            torch.autograd.backward(phase_loss.loss * (weight * self.ranks.size))
        return replace(phase_loss, loss=phase_loss.loss.detach())

    def _reduce(
        self, role: Role, losses: Sequence[tuple[PhaseLoss, MicroBatch]]
    ) -> dict[str, float]:
        """Sum over ranks what was counted on each, and finish the gradient's mean."""
        found = self.sharding.local(gradients(role))
        names, numbers = local_sums(losses, found, self.sharding.replicas)
        totals = dict(zip(names, self.ranks.sum(numbers).tolist(), strict=True))
        weight = check_normalizers(role.name, totals)
        if weight is not None:
            scale(found, 1 / weight)
        values = phase_values(totals, weight, self.settings.batch_size)
        silent = self.sharding.zeros_for_none and values["grad_norm"] == 0 and values["loss"] != 0
        if silent:
            raise TrainingError(
                f"the backward pass of {role.name} gave no gradient to any of its tensors, though "
                f"its loss is {values['loss']:.3g}; was it run under another role?"
            )
        return values

    def _clear_gradients(self, trained: Role) -> None:
        """Of the role; of all where their tensors lie in one row, and each gets a gradient."""
        for role in self.roles.values() if self.sharding.zeros_for_none else (trained,):
            for parameter in role.tensors:
                parameter.grad = None

    def _update(self, role: Role, values: dict[str, float]) -> bool:
        """Clip and step, or skip; the counters, the schedule and the EMA follow the success."""
        role.attempted += 1
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        if not finite or values.get("finite_share") == 0:
            self._skip(role)
            return False
        assert role.settings is not None
        assert role.optimizer is not None
        clip = role.settings.clip_norm
        if clip is not None and values["grad_norm"] > clip:
            scale(self.sharding.local(gradients(role)), clip / values["grad_norm"])
        for group in role.optimizer.param_groups:
            group["lr"] = role.learning_rate
        role.optimizer.step()
        role.successful += 1
        role.skipped_in_a_row = 0
        if role.name == STUDENT:
            self.roles.update_ema()
        return True

    def _skip(self, role: Role) -> None:
        role.skipped += 1
        role.skipped_in_a_row += 1
        if role.skipped_in_a_row >= self.settings.max_skipped_in_a_row:
            raise TrainingError(
                f"{role.name}: {role.skipped_in_a_row} updates in a row were skipped because "
                f"loss or gradients were not finite; the run cannot recover by itself. Lower "
                f"optimizers.{role.name}.lr, or start again from an earlier checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on (see `training.state`)."""
        return state_dict(self.roles, self.sharding)

    def empty_state(
        self, optimizers: Mapping[str, Iterable[str]], partial: bool = False
    ) -> dict[str, Any]:
        """What the tensors of a checkpoint are read into (see `training.state`)."""
        return empty_state(self.roles, self.sharding, optimizers, partial)

    def load_state_dict(self, state: Mapping[str, Any], partial: bool = False) -> None:
        """Put back what `state_dict` gave (see `training.state`)."""
        load_state_dict(self.roles, self.sharding, state, partial)


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place; a rank may hold none of a role's."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def gradients(role: Role) -> list[Tensor]:
    """The role's gradients that exist."""
    return list(gradients_of(role).values())
