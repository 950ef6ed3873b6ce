"""Updates that are skipped change nothing but the skip counter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.diffusion.draw import Draw
from fewstep.errors import TrainingError
from fewstep.methods.method import PhaseLoss
from fewstep.roles.ema import EMASettings
from fewstep.roles.optimizer import OptimizerSettings, ScheduleSettings
from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import run_cycle
from fewstep.training.phase import PhaseRequest
from fewstep.training.worker import Worker

NAMES = ("student", "fake_score", "teacher_score", "student_ema")
NAN, INF = float("nan"), float("inf")


class SpoilGradient(torch.autograd.Function):
    """The identity, whose gradient is a given number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, ctx.value), None


def spoil(monkeypatch, worker: Worker, role: str, where: str, value: float, part: int) -> list[int]:
    """Make one micro-batch of a role's phases non-finite; the list holds 1 while it is on."""
    original, on = worker.method.phase_loss, [1]

    def phase_loss(name, roles, batch, *rest) -> PhaseLoss:
        found = original(name, roles, batch, *rest)
        if not on or name != role or int(batch.sample_ids[0]) // 3 != part:
            return found
        in_loss = where == "loss"
        loss = found.loss + value if in_loss else SpoilGradient.apply(found.loss, value)
        return PhaseLoss(loss, found.metrics, found.normalizer, found.outputs)

    monkeypatch.setattr(worker.method, "phase_loss", phase_loss)
    return on


def state_of(worker: Worker) -> dict[str, Any]:
    return copy.deepcopy(worker.state_dict())


def assert_tensors_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    for section in ("networks", "optimizers"):
        for name, tensors in left[section].items():
            assert tensors.keys() == right[section][name].keys()
            for key, value in tensors.items():
                assert torch.equal(value, right[section][name][key]), (section, name, key)


@pytest.fixture
def worker(build_worker, dmd2, storage) -> Worker:
    optimizer = OptimizerSettings(
        lr=0.01, betas=(0.5, 0.9), schedule=ScheduleSettings(warmup_updates=10)
    )
    made = build_worker(
        dmd2(),
        storage,
        optimizer=optimizer,
        names=NAMES,
        ema=EMASettings(decay=0.5),
        micro_batch_size=3,
        max_skipped_in_a_row=5,
    )
    run_cycle(made, 1, 2, CycleSettings())
    return made


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("role", ["student", "fake_score"])
def test_a_skip_changes_nothing_but_its_counter(
    worker, monkeypatch, role, where, value, part
) -> None:
    on = spoil(monkeypatch, worker, role, where, value, part)
    before = state_of(worker)
    rate = worker.roles[role].learning_rate
    result = worker.run_phase(PhaseRequest(2, role, role, rollout=role))
    after = state_of(worker)
    assert not result.updated
    assert_tensors_equal(before, after)
    counters = before["counters"]
    counters["roles"][role]["attempted"] += 1
    counters["roles"][role]["skipped"] += 1
    counters["roles"][role]["skipped_in_a_row"] += 1
    assert after["counters"] == counters
    assert worker.roles[role].learning_rate == rate
    assert result.metrics["skipped"] == 1
    assert all(p.grad is None for p in worker.roles[role].tensors)
    # And the run goes on.
    on.clear()
    assert all(r.updated for r in run_cycle(worker, 3, 2, CycleSettings()))
    assert worker.roles[role].skipped_in_a_row == 0
    assert worker.roles[role].skipped == 1
    assert worker.roles["student"].learning_rate == pytest.approx(0.01 * 3 / 11)
    for network in worker.roles.storage.networks.values():
        assert all(torch.isfinite(p).all() for p in network.parameters())


def test_the_cycle_goes_on_after_a_skip(worker, monkeypatch) -> None:
    spoil(monkeypatch, worker, "student", "loss", NAN, 1)
    results = run_cycle(worker, 2, 2, CycleSettings())
    assert [r.updated for r in results] == [False, True, True]
    assert worker.roles["fake_score"].successful == 4
    assert worker.roles["student"].successful == 1
    assert worker.roles.ema_updates == 1


def test_a_skipped_run_is_the_run_without_that_phase(build_worker, dmd2, monkeypatch) -> None:
    """What follows a skip does not depend on what was skipped."""
    found = []
    for value in (NAN, INF):
        worker = build_worker(dmd2(), micro_batch_size=3)
        on = spoil(monkeypatch, worker, "fake_score", "loss", value, 0)
        run_cycle(worker, 1, 2, CycleSettings())
        on.clear()
        run_cycle(worker, 2, 2, CycleSettings())
        found.append(state_of(worker))
    assert_tensors_equal(*found)


@pytest.mark.parametrize("role", ["student", "fake_score"])
def test_too_many_in_a_row_end_the_run_and_name_the_role(worker, monkeypatch, role) -> None:
    on = spoil(monkeypatch, worker, role, "loss", NAN, 0)
    request = PhaseRequest(2, role, role, rollout=role)
    for _ in range(4):
        worker.run_phase(request)
    on.clear()
    assert worker.run_phase(request).updated
    on.append(1)
    for _ in range(4):
        worker.run_phase(request)
    with pytest.raises(TrainingError) as error:
        worker.run_phase(request)
    assert str(error.value).startswith(f"{role}: 5 updates in a row were skipped")
    assert f"optimizers.{role}.lr" in str(error.value)


# Directions that are partly not finite.


def poison(worker: Worker, whole: bool) -> None:
    """Let the fake score be NaN in one entry of some samples, or in all."""

    def hook(module, arguments, output):
        x = arguments[0]
        wrong = torch.ones_like(output, dtype=torch.bool) if whole else torch.zeros_like(output) > 0
        wrong[:, 1] |= x[:, 0] > 0
        return torch.where(wrong, torch.full_like(output, NAN), output)

    worker.roles.storage.module("fake_score").register_forward_hook(hook)


def student_phase(worker: Worker):
    return worker.run_phase(PhaseRequest(1, "student", "student", rollout="student"))


def test_partly_non_finite_directions_are_counted_and_zeroed(build_worker, dmd2) -> None:
    clean, poisoned = build_worker(dmd2()), build_worker(dmd2())
    poison(poisoned, whole=False)
    batch = clean.batches.batch(Draw(11, 1, "student"), 8)
    x0 = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draw = Draw(11, 1, "student")
    expected = clean.method.score(clean.roles, x0, batch, draw)
    found = poisoned.method.score(poisoned.roles, x0, batch, draw)
    changed = found.direction != expected.direction
    assert not expected.nonfinite_entries.any()
    assert 0 < int(found.nonfinite_entries.sum()) < 8
    assert torch.equal(changed.sum(1), found.nonfinite_entries)
    assert (found.direction[changed] == 0).all()


@pytest.mark.parametrize("micro", [1, 2, 4, 5])
def test_they_count_the_same_for_every_split(build_worker, dmd2, micro) -> None:
    results, workers = [], []
    for size in (None, micro):
        worker = build_worker(dmd2(), micro_batch_size=size)
        poison(worker, whole=False)
        results.append(student_phase(worker))
        workers.append(worker)
    whole, split = results
    assert whole.updated
    assert split.updated
    assert 0 < whole.metrics["nonfinite_entries"] < 8
    for key, value in whole.metrics.items():
        assert split.metrics[key] == pytest.approx(value, rel=1e-12), key
    share = 1 - whole.metrics["nonfinite_entries"] / 16
    assert whole.metrics["finite_share"] == pytest.approx(share)
    for a, b in zip(*(w.roles["student"].tensors for w in workers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro", [None, 1, 3])
def test_a_direction_with_nothing_finite_is_a_skip(build_worker, dmd2, micro) -> None:
    worker = build_worker(dmd2(), micro_batch_size=micro)
    poison(worker, whole=True)
    before = state_of(worker)
    result = student_phase(worker)
    assert not result.updated
    assert result.metrics["nonfinite_entries"] == 16
    assert worker.roles["student"].skipped == 1
    assert_tensors_equal(before, state_of(worker))
