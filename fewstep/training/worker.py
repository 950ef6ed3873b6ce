"""A worker: runs phases on the roles of this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, final

import torch
from pydantic import Field
from torch import Tensor

from fewstep.data.batches import Batch, BatchSource
from fewstep.diffusion.draw import Draw
from fewstep.errors import TrainingError, UserError
from fewstep.methods.method import Method, PhaseLoss
from fewstep.roles.role import STUDENT, Role, Roles
from fewstep.settings import Settings
from fewstep.training.phase import PhaseRequest, PhaseResult

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
@dataclass
class Worker:
    """Holds roles and runs phases on them.

    Attributes:
        seed: of all draws.
        settings: batch sizes and limits.
        method: computes each phase's loss.
        roles: the networks and optimizers.
        batches: where samples come from.
    """

    seed: int
    settings: TrainSettings
    method: Method
    roles: Roles
    batches: BatchSource

    def run_phase(self, request: PhaseRequest) -> PhaseResult:
        """Gradients of all micro-batches, checks, and at most one update of the role.

        Raises:
            TrainingError: for a broken gradient invariant, mixed or bad normalizers, or too many
                skipped updates in a row.
        """
        role = self.roles[request.role]
        rollout = Draw(self.seed, request.cycle, request.rollout)
        batch = self.batches.batch(rollout, self.settings.batch_size)
        clear_gradients(role)
        size = self.settings.micro_batch_size or len(batch)
        losses = [
            self._backward(request, batch.rows(start, start + size), rollout, start)
            for start in range(0, len(batch), size)
        ]
        self.roles.check_gradients(role.name)
        learning_rate = role.learning_rate
        values = reduce_losses(role, losses, len(batch))
        updated = self._update(role, values)
        clear_gradients(role)
        values |= {"lr": learning_rate, "updates": role.successful, "skipped": role.skipped}
        outputs = concatenate_outputs(losses) if request.hands_over else {}
        done = replace(request, external={})
        return PhaseResult(done, updated, role.attempted, values, outputs)

    def _backward(
        self, request: PhaseRequest, part: Batch, rollout: Draw, start: int
    ) -> tuple[PhaseLoss, int]:
        """Add a micro-batch's gradient, weighted, to the role's; the loss without its graph.

        `start`: position of the micro-batch in the phase's batch.
        """
        draw = Draw(self.seed, request.cycle, request.name)
        external = {
            key: value[start : start + len(part)] for key, value in request.external.items()
        }
        with self.roles.use(request.role):
            phase_loss = self.method.phase_loss(
                request.role, self.roles, part, draw, rollout, external
            )
            weight: float | Tensor = len(part) / self.settings.batch_size
            if phase_loss.normalizer is not None:
                weight = phase_loss.normalizer
            # Under the role's own adapter: checkpointed layers run forward again here.
            torch.autograd.backward(phase_loss.loss * weight)
        return replace(phase_loss, loss=phase_loss.loss.detach()), len(part)

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
            torch._foreach_mul_(gradients(role), clip / values["grad_norm"])
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
        """All that a run needs to go on: tensors of networks and optimizers, and counters.

        Returns:
            "networks" and "optimizers": name -> tensors by key; "counters": plain numbers.
        """
        storage = self.roles.storage
        return {
            "networks": {name: net.state_dict() for name, net in storage.networks.items()},
            "optimizers": {
                r.name: optimizer_tensors(r) for r in self.roles.values() if r.trainable
            },
            "counters": {
                "roles": {
                    r.name: {
                        "attempted": r.attempted,
                        "successful": r.successful,
                        "skipped": r.skipped,
                        "skipped_in_a_row": r.skipped_in_a_row,
                    }
                    for r in self.roles.values()
                },
                "ema_updates": self.roles.ema_updates,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave; every key must be there and none be left over.

        Raises:
            UserError: where networks, optimizers or roles are missing or left over.
        """
        own = self.state_dict()
        for what, found, needed in (
            ("networks", state["networks"], own["networks"]),
            ("optimizers", state["optimizers"], own["optimizers"]),
            ("roles", state["counters"]["roles"], own["counters"]["roles"]),
        ):
            if set(found) != set(needed):
                raise UserError(
                    f"the saved {what} are {', '.join(sorted(found)) or 'none'}, but the run has "
                    f"{', '.join(sorted(needed))}"
                )
        for name, network in self.roles.storage.networks.items():
            network.load_state_dict(state["networks"][name])
        for role in self.roles.values():
            for key, value in state["counters"]["roles"][role.name].items():
                setattr(role, key, value)
            if role.trainable:
                load_optimizer_tensors(role, state["optimizers"][role.name])
        self.roles.ema_updates = state["counters"]["ema_updates"]


def gradients(role: Role) -> list[Tensor]:
    """The role's gradients that exist."""
    return [p.grad for p in role.tensors if p.grad is not None]


def clear_gradients(role: Role) -> None:
    """Free the role's gradients."""
    for parameter in role.tensors:
        parameter.grad = None


def reduce_losses(
    role: Role, losses: Sequence[tuple[PhaseLoss, int]], batch_size: int
) -> dict[str, float]:
    """Finish the gradient's mean, and the phase's metrics, with one transfer to the host.

    With normalizers the gradients hold sum(n * grad) so far and are divided by sum(n) here,
    before any clipping.

    Args:
        role: whose gradients were accumulated.
        losses: each micro-batch's loss and its number of samples.
        batch_size: samples of the phase.

    Returns:
        "loss", "grad_norm", the method's metrics, and "finite_share" of the method's entries.

    Raises:
        TrainingError: where only some micro-batches have a normalizer, or one is not positive
            and finite.
    """
    first = losses[0][0]
    weights = [n / batch_size for _, n in losses]
    found = gradients(role)
    if any(loss.normalizer is not None for loss, _ in losses):
        normalizers = check_normalizers(role, [loss for loss, _ in losses])
        total = sum(normalizers)
        torch._foreach_div_(found, total)
        weights = [n / total for n in normalizers]
    rows = {
        "loss": [loss.loss for loss, _ in losses],
        **{key: [loss.metrics[key] for loss, _ in losses] for key in first.metrics},
    }
    means = [sum(w * v for w, v in zip(weights, row, strict=True)) for row in rows.values()]
    norm = torch.nn.utils.get_total_norm(found, foreach=True)
    bad = [loss.nonfinite_entries for loss, _ in losses if loss.nonfinite_entries is not None]
    numbers = torch.stack([torch.as_tensor(v).double() for v in (norm, sum(bad), *means)])
    grad_norm, nonfinite, *reduced = numbers.tolist()
    values = {"grad_norm": grad_norm, **dict(zip(rows, reduced, strict=True))}
    if bad:
        values["nonfinite_entries"] = nonfinite
        values["finite_share"] = 1 - nonfinite / sum(loss.entries for loss, _ in losses)
    if "sample_mean_square" in values:
        variance = values.pop("sample_mean_square") - values["sample_mean"] ** 2
        values["sample_std"] = (
            math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else variance
        )
    return values


def check_normalizers(role: Role, losses: Sequence[PhaseLoss]) -> list[float]:
    """All normalizers of a phase as numbers; raises TrainingError unless all are positive."""
    if any(loss.normalizer is None for loss in losses):
        raise TrainingError(f"{role.name}: some micro-batches have a normalizer and some have none")
    numbers = [float(loss.normalizer) for loss in losses if loss.normalizer is not None]
    wrong = [n for n in numbers if not (math.isfinite(n) and n > 0)]
    if wrong:
        raise TrainingError(f"{role.name}: a loss normalizer is {wrong[0]}: it must be positive")
    return numbers


def concatenate_outputs(losses: Sequence[tuple[PhaseLoss, int]]) -> dict[str, Tensor]:
    """Outputs of all micro-batches, in the order of the samples."""
    return {
        key: torch.cat([loss.outputs[key] for loss, _ in losses]) for key in losses[0][0].outputs
    }


def optimizer_tensors(role: Role) -> dict[str, Tensor]:
    """The optimizer's state as tensors named "<parameter>/<entry>"."""
    assert role.optimizer is not None
    return {
        f"{key}/{entry}": value
        for key, parameter in role.parameters.items()
        for entry, value in role.optimizer.state[parameter].items()
    }


def load_optimizer_tensors(role: Role, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave.

    Raises:
        TrainingError: where a tensor belongs to no parameter of the role.
    """
    assert role.optimizer is not None
    role.optimizer.state.clear()
    for name, value in tensors.items():
        key, _, entry = name.rpartition("/")
        if key not in role.parameters:
            raise TrainingError(f"the saved optimizer of {role.name} has a tensor for {key!r}")
        parameter = role.parameters[key]
        # The step count too: a fused optimizer wants it where the parameter is.
        role.optimizer.state[parameter][entry] = value.to(parameter.device)
