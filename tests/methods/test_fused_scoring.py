"""All scores from one network call: the same numbers as from one call each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import on_ranks
from fewstep.config import MAY_CHANGE, fingerprint
from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.errors import UserError
from fewstep.methods.dmd2 import DMD2
from fewstep.methods.dmd2_settings import DMD2Settings
from fewstep.models.dit import DiT, DiTNetwork
from fewstep.models.model import Model
from fewstep.models.module import ModuleModel
from fewstep.parallel.compute import recompute_in_backward
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.parallel.settings import ParallelSettings
from fewstep.parallel.sharding import Sharding, build_sharding, spread
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import FAKE_SCORE, STUDENT, TEACHER_SCORE, Roles
from fewstep.roles.storage import LoraSettings, build_shared_base

SAMPLES = 4
DRAW = Draw(3, 5, "student")
TRAINED = {STUDENT: OptimizerSettings(lr=1e-3), FAKE_SCORE: OptimizerSettings(lr=1e-3)}


class Perceptron(nn.Module):
    """A perceptron with labels, whose blocks are adapted layers themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.first = nn.Linear(3, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor) -> Tensor:
        hidden = self.first(torch.cat([x, sigma[:, None]], 1)) + self.embed(class_labels)
        for layer in self.layers:
            hidden = hidden + layer(torch.tanh(hidden))
        output: Tensor = self.last(hidden)
        return output


def build_model(family: str) -> tuple[Model, tuple[str, ...] | None]:
    """A small network, and what of it to adapt (None: the family's own list)."""
    if family == "perceptron":
        model = ModuleModel(Perceptron, (2,), classes=3, null_label=3)
        return model, ("embed", "first", "layers.0", "layers.1", "last")
    return (
        DiT(
            DiTNetwork(
                sample_size=4,
                patch_size=2,
                num_layers=2,
                num_attention_heads=2,
                attention_head_dim=4,
                num_embeds_ada_norm=5,
            )
        ),
        None,
    )


def build(
    family: str, kind: str = "none", ranks: Ranks = SINGLE, recompute: bool = False
) -> tuple[Roles, Sharding]:
    """Roles on a shared base in float64, no two with the same weights."""
    model, targets = build_model(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = LoraSettings(rank=2, alpha=3.0, targets=targets)
        storage = build_shared_base(model, model.build_network(), [STUDENT, FAKE_SCORE], lora)
        with torch.no_grad():
            for name in (STUDENT, FAKE_SCORE):
                for parameter in storage.parameters(name).values():
                    parameter.add_(0.3 * torch.randn_like(parameter))
    sharding = build_sharding(ParallelSettings(kind=kind), ranks, None)  # type: ignore[arg-type]
    spread(storage, sharding, model.blocks, None, dtype=torch.float64, recompute=recompute)
    sharding.wrap(storage, [STUDENT, FAKE_SCORE, TEACHER_SCORE], list(TRAINED))
    names = (STUDENT, FAKE_SCORE, TEACHER_SCORE)
    return Roles(model, storage, names, TRAINED, dtype=torch.float64), sharding


def method(score_batching: str, guidance: float) -> DMD2:
    settings: dict[str, Any] = {"score_batching": score_batching, "guidance": guidance}
    return DMD2(DMD2Settings(steps=2, **settings))


def make_batch(roles: Roles) -> Batch:
    return Batch(torch.arange(SAMPLES), roles.model.example_condition(SAMPLES))


def direction(roles: Roles, score_batching: str, guidance: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (SAMPLES, *roles.model.sample_shape)
    x0 = torch.randn(shape, generator=generator, dtype=torch.float64)
    return method(score_batching, guidance).score(roles, x0, make_batch(roles), DRAW).direction


def student_gradients(
    roles: Roles, sharding: Sharding, score_batching: str, guidance: float
) -> list[Tensor]:
    """Of a student phase, every tensor whole."""
    with roles.use(STUDENT), sharding.accumulating(roles.storage, STUDENT, last=True):
        batch, dmd2 = make_batch(roles), method(score_batching, guidance)
        dmd2.phase_loss(STUDENT, roles, batch, DRAW, DRAW, {}).loss.backward()
    roles.check_gradients(STUDENT, sharding.zeros_for_none)
    found = []
    for parameter in roles[STUDENT].tensors:
        gradient = parameter.grad if parameter.grad is not None else parameter.detach()
        whole = sharding.saved(parameter, gradient)
        found.append(whole.full_tensor() if isinstance(whole, DTensor) else whole.clone())
        parameter.grad = None
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1e-8
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


every_family = pytest.mark.parametrize("family", ["dit", "perceptron"])
every_guidance = pytest.mark.parametrize("guidance", [1.0, 3.0])


@every_family
@every_guidance
def test_the_direction_is_that_of_separate_calls(family: str, guidance: float) -> None:
    roles, _ = build(family)
    separate = direction(roles, "separate", guidance)
    fused = direction(roles, "fused", guidance)
    assert_same(fused, separate)
    assert not fused.requires_grad
    assert not torch.allclose(direction(roles, "fused", 2.0), separate, rtol=1e-3)


@every_guidance
def test_scoring_is_one_network_call_on_parts_of_one_batch(spy: Callable, guidance: float) -> None:
    roles, _ = build("dit")
    calls = spy(roles)
    direction(roles, "separate", guidance)
    separate = list(calls)
    calls.clear()
    direction(roles, "fused", guidance)
    (call,) = calls
    assert len(separate) == (2 if guidance == 1 else 3)
    assert torch.equal(call.x, torch.cat([c.x for c in separate]))
    assert torch.equal(call.sigma, torch.cat([c.sigma for c in separate]))
    labels = [c.condition["class_labels"] for c in separate]
    assert torch.equal(call.condition["class_labels"], torch.cat(labels))


@every_family
@every_guidance
@pytest.mark.parametrize("recompute", [False, True])
def test_the_students_gradient_is_that_of_separate_calls(
    family: str, guidance: float, recompute: bool
) -> None:
    """Its graph outlives the fused call, and a recomputed forward pass is the student's."""
    plain, whole = build(family)
    expected = student_gradients(plain, whole, "separate", guidance)
    roles, sharding = build(family)
    if recompute:
        base = roles.storage.networks["base"]
        recompute_in_backward(list(roles.model.blocks(base).values()))
    for found, other in zip(
        student_gradients(roles, sharding, "fused", guidance), expected, strict=True
    ):
        assert_same(found, other)


def test_a_failing_call_leaves_the_student_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    roles, sharding = build("dit")
    expected = student_gradients(roles, sharding, "fused", 3.0)
    base = roles.storage.networks["base"]
    final = base.proj_out_2

    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(final, "forward", fail)
        with pytest.raises(ZeroDivisionError):
            direction(roles, "fused", 3.0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    for found, other in zip(
        student_gradients(roles, sharding, "fused", 3.0), expected, strict=True
    ):
        assert torch.equal(found, other)


def test_the_student_is_bit_equal_before_and_after() -> None:
    roles, _ = build("dit")
    dmd2, batch = method("fused", 3.0), make_batch(roles)
    simulation = dmd2.simulate(roles, batch, DRAW)
    before = dmd2.generate(roles, simulation)
    dmd2.score(roles, before.detach(), batch, DRAW)
    assert torch.equal(dmd2.generate(roles, simulation), before)


# On two ranks


class Collectives(TorchDispatchMode):
    """Counts what is sent between ranks."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def on_a_rank(ranks: Ranks) -> dict[str, Any]:
    """Directions, gradients and numbers of collectives, from bases on two ranks."""
    found: dict[str, Any] = {}
    for kind, family in itertools.product(("ddp", "fsdp1", "fsdp2"), ("dit", "perceptron")):
        roles, sharding = build(family, kind, ranks)
        direction(roles, "separate", 1.0)  # the first pass of FSDP sets things up
        for guidance in (1.0, 3.0):
            for batching in ("separate", "fused"):
                key = f"{kind} {family} {guidance} {batching}"
                with Collectives() as counter:
                    found[f"{key} direction"] = direction(roles, batching, guidance)
                found[f"{key} collectives"] = counter.count
                gradients = student_gradients(roles, sharding, batching, guidance)
                found[f"{key} gradients"] = gradients
    return found


@pytest.fixture(scope="module")
def from_ranks() -> dict[str, Any]:
    """What two ranks have found."""
    found: dict[str, Any] = on_ranks(on_a_rank)[0]
    return found


@pytest.mark.slow
@every_family
@every_guidance
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_spread_base_gives_the_same_and_its_shards_are_gathered_once(
    from_ranks: dict[str, Any], kind: str, family: str, guidance: float
) -> None:
    roles, sharding = build(family)
    expected = direction(roles, "separate", guidance)
    gradients = student_gradients(roles, sharding, "separate", guidance)
    found = {
        batching: {
            what: from_ranks[f"{kind} {family} {guidance} {batching} {what}"]
            for what in ("direction", "gradients", "collectives")
        }
        for batching in ("separate", "fused")
    }
    for one in found.values():
        assert_same(one["direction"], expected)
        for gradient, other in zip(one["gradients"], gradients, strict=True):
            assert_same(gradient, other)
    calls = 2 if guidance == 1 else 3
    assert (found["fused"]["collectives"] > 0) == (kind != "ddp")
    assert found["separate"]["collectives"] == calls * found["fused"]["collectives"]


# Settings


def test_networks_of_their_own_are_refused_with_the_recipe(make_recipe: Callable) -> None:
    with pytest.raises(
        UserError, match=r"method\.score_batching: 'fused' needs storage 'shared_base'.*separate"
    ):
        make_recipe("dmd2", {"method.score_batching": "fused"})
    make_recipe("dmd2", {"method.score_batching": "separate"})


def test_it_may_change_on_resume(make_recipe: Callable) -> None:
    recipes = [
        make_recipe("dmd2", {"storage": "shared_base", "method.score_batching": batching})
        for batching in ("fused", "separate")
    ]
    assert "method.score_batching" in MAY_CHANGE
    assert fingerprint(recipes[0]) == fingerprint(recipes[1])
