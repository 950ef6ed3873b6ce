"""Small roles to run methods on, and a spy on their network calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from heads import ON, MakeWorker
from torch import Tensor, nn

from fewstep.build import build_worker
from fewstep.data.batches import Batch
from fewstep.data.dataset import Dataset
from fewstep.models.dit import DiT, DiTNetwork
from fewstep.models.mixture import MixtureSettings
from fewstep.models.model import Condition, Model
from fewstep.parallel.sharding import Replicated, spread
from fewstep.pretrained import load_weights
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import FAKE_SCORE, STUDENT, TEACHER_SCORE, Roles
from fewstep.roles.storage import LoraSettings, Storage, build_independent, build_shared_base
from fewstep.training.worker import Worker

TRAINED = {STUDENT: OptimizerSettings(lr=1e-3), FAKE_SCORE: OptimizerSettings(lr=1e-3)}
ROLES = (STUDENT, FAKE_SCORE, TEACHER_SCORE)


@dataclass(frozen=True)
class Call:
    role: str | None
    x: Tensor
    sigma: Tensor
    condition: Condition


def build_roles(model: Model, storage: Storage) -> Roles:
    """Roles in float64, each role's weights moved a little so that no two are equal."""
    spread(storage, Replicated(), model.blocks, None, dtype=torch.float64)
    roles = Roles(model, storage, ROLES, TRAINED, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in (STUDENT, FAKE_SCORE):
            for parameter in roles[name].tensors:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.05 * noise)
    return roles


@pytest.fixture
def mixture_roles() -> Callable[..., Roles]:
    """Perceptrons and the exact teacher: `mixture_roles(**settings)`."""

    def build(**settings: object) -> Roles:
        torch.manual_seed(0)
        model = MixtureSettings(width=8, depth=2, **settings).build()  # type: ignore[arg-type]
        return build_roles(model, build_independent(model, model.build_network(), ROLES))

    return build


@pytest.fixture
def dit_roles() -> Callable[[str], Roles]:
    """A small class-conditional transformer: `dit_roles("shared_base")`."""

    def build(storage: str) -> Roles:
        torch.manual_seed(0)
        size = DiTNetwork(
            sample_size=4,
            patch_size=2,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_embeds_ada_norm=5,
        )
        model = DiT(size)
        base: nn.Module = model.build_network()
        if storage == "independent":
            return build_roles(model, build_independent(model, base, ROLES))
        shared = build_shared_base(model, base, ROLES[:2], LoraSettings(rank=2, alpha=2.0))
        return build_roles(model, shared)

    return build


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Roles], list[Call]]:
    """Write down every network call of some roles, by the role in use."""

    def install(roles: Roles) -> list[Call]:
        calls: list[Call] = []
        forward = type(roles.model).forward

        def spying(
            self: Model, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition
        ) -> Tensor:
            calls.append(Call(roles._active, x.detach().clone(), sigma.clone(), condition))
            return forward(self, network, x, sigma, condition)

        monkeypatch.setattr(type(roles.model), "forward", spying)
        return calls

    return install


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """A batch of `count` samples for a model."""

    def build(model: Model, count: int = 6) -> Batch:
        return Batch(torch.arange(count), model.example_condition(count))

    return build


@pytest.fixture
def make_worker(make_recipe: Callable[..., Any], ten_images: Dataset) -> MakeWorker:
    """A worker of a tiny recipe, all of whose trained roles have moved a little."""

    def make(storage: str = "independent", *changes: Mapping[str, Any]) -> Worker:
        merged = {**ON, "storage": storage}
        for change in changes:
            merged |= change
        recipe = make_recipe("dmd2", merged)
        model = recipe.model.build()
        worker = build_worker(recipe, model, ten_images, load_weights(recipe, model))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name in worker.method.trained_roles:
                for parameter in worker.roles[name].tensors:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(0.2 * noise)
        return worker

    return make
