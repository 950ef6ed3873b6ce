"""Workers over tiny roles, and methods that misbehave on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fewstep.data.batches import Batch, ConditionBatches
from fewstep.diffusion.draw import Draw
from fewstep.methods.dmd2 import DMD2
from fewstep.methods.dmd2_settings import DMD2Settings
from fewstep.methods.method import Method, PhaseLoss, SamplerSpec
from fewstep.models.model import Model
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import Roles
from fewstep.training.worker import TrainSettings, Worker

CPU = torch.device("cpu")


class Scripted(Method):
    """A method whose phases are a function of the test's."""

    name: ClassVar[str] = "scripted"
    roles: ClassVar[tuple[str, ...]] = ("student", "fake_score", "teacher_score")
    trained_roles: ClassVar[tuple[str, ...]] = ("student", "fake_score")
    needs_data: ClassVar[bool] = False

    def __init__(self, script: Callable[..., PhaseLoss]) -> None:
        self.script = script

    @property
    def fake_updates_per_student(self) -> int:
        return 2

    def check(self, model: Model) -> None:
        pass

    def sampler(self, steps: int | None = None) -> SamplerSpec:
        return SamplerSpec((1.0,), "euler")

    def phase_loss(
        self,
        role: str,
        roles: Roles,
        batch: Batch,
        draw: Draw,
        rollout: Draw,
        external: Mapping[str, Tensor],
    ) -> PhaseLoss:
        return self.script(role, roles, batch, draw)


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def dmd2() -> Callable[..., DMD2]:
    """The method with its settings."""

    def build(**settings: Any) -> DMD2:
        return DMD2(DMD2Settings(**{"steps": 3, "fake_updates_per_student": 2, **settings}))

    return build


@pytest.fixture
def build_worker(build_roles, point_model) -> Callable[..., Worker]:
    """A worker over points in float64. A large `eps` makes updates depend on gradients' scale."""

    def build(method: Method, storage: str = "independent", **options: Any) -> Worker:
        optimizer = options.pop("optimizer", None) or OptimizerSettings(
            lr=0.1, betas=(0.5, 0.9), eps=1.0, clip_norm=None
        )
        batches = options.pop("batches", ConditionBatches(None, CPU))
        train = {
            "cycles": 100,
            "batch_size": 8,
            **{k: options.pop(k) for k in list(options) if k in TrainSettings.model_fields},
        }
        model = options.pop("model", point_model)
        roles = options.pop("roles", None) or build_roles(
            model, storage, optimizer=optimizer, **options
        )
        return Worker(11, TrainSettings(**train), method, roles, batches)

    return build
