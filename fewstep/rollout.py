"""Rollout: student samples for the coming phases, made by an engine that holds a copy of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Protocol, final

import torch
from pydantic import Field
from torch import Tensor

from fewstep.diffusion.samplers import sample_few_step
from fewstep.methods.method import Rollout
from fewstep.parallel.offload import Offload, held_tensors
from fewstep.parallel.sharding import Replicated
from fewstep.roles.role import STUDENT, Roles
from fewstep.settings import Settings
from fewstep.weights import Confirmation, bind, canonical_names, confirm, student_tensors


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


class RolloutEngine(Protocol):
    """Makes student samples with a copy of the student that it is sent."""

    def generate(self, rollout: Rollout) -> Tensor:
        """Clean samples [B, ...], detached, on the engine's device, in the dtype of the noise.

        Raises:
            TrainingError: while asleep.
        """

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take a portion of the student's tensors, by canonical name (see `fewstep.weights`).

        Raises:
            TrainingError: naming a tensor that is unknown, or of another shape or dtype, before
                any is taken; while asleep.
        """

    def bound(self, version: int) -> Confirmation:
        """What the network that samples are made with holds now, read from that network itself.

        Args:
            version: of what it ought to hold.
        """

    def sleep(self) -> None:
        """Give the device's memory back."""

    def wake(self) -> None:
        """Take it again, with the weights that there were."""


@final
class StudentEngine:
    """The student as the trainer has it: its samples equal the trainer's bit for bit."""

    def __init__(self, roles: Roles) -> None:
        """`roles`: hold the student, whole (`build_worker` with roles=("student",))."""
        self.roles = roles
        self._names = canonical_names(roles.storage, STUDENT)
        self._tensors = student_tensors(roles, STUDENT)
        self._offload = Offload(roles.device, lambda: held_tensors(roles, Replicated()))

    @torch.no_grad()
    def generate(self, rollout: Rollout) -> Tensor:
        """See `RolloutEngine.generate`."""
        self._offload.require_awake("making samples")
        noise = rollout.noise.to(self.roles.device)
        condition = {key: value.to(noise.device) for key, value in rollout.condition.items()}
        with self.roles.use(STUDENT) as student:
            return sample_few_step(
                lambda x, sigma: student(x, sigma, condition),
                self.roles.model.path.prior(noise[:, 0]),
                rollout.sigmas,
                rollout.transition,
                lambda step: noise[:, step],
            )

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine.load_weights`; adapters only, where the student is one."""
        self._offload.require_awake("taking weights")
        bind(self._tensors, weights)

    def bound(self, version: int) -> Confirmation:
        """See `RolloutEngine.bound`."""
        self._offload.require_awake("a checksum")
        return confirm(self.roles.storage.module(STUDENT), self._names, version)

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        self._offload.sleep()

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        self._offload.wake()
