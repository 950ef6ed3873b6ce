"""The phases of a cycle."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch

from fewstep.diffusion.draw import Draw
from fewstep.training.cycle import CycleSettings, plan_cycle
from fewstep.training.loop import run_cycle
from fewstep.training.phase import PhaseRequest

ORDERS = ["student_first", "fake_score_first"]


def names(cycle: int, k: int, settings: CycleSettings) -> list[str]:
    return [request.name for request in plan_cycle(cycle, k, settings)]


@pytest.mark.parametrize("k", [1, 3])
def test_order(k) -> None:
    fakes = [f"fake_score/{i}" for i in range(k)]
    assert names(1, k, CycleSettings()) == ["student", *fakes]
    assert names(1, k, CycleSettings(order="fake_score_first")) == [*fakes, "student"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batches", ["fresh", "reuse_student"])
def test_warm_up_cycles_train_the_fake_score_only(order, batches) -> None:
    settings = CycleSettings(order=order, warmup_cycles=2, fake_batches=batches)
    found = [[r.role for r in plan_cycle(cycle, 2, settings)] for cycle in (1, 2, 3)]
    assert found[:2] == [["fake_score"] * 2] * 2
    assert sorted(found[2]) == ["fake_score", "fake_score", "student"]


def test_methods_without_a_fake_score_train_the_student_from_the_first_cycle() -> None:
    assert names(1, 0, CycleSettings()) == ["student"]
    assert names(1, 0, CycleSettings(warmup_cycles=3)) == ["student"]


@pytest.mark.parametrize("order", ORDERS)
def test_phase_names_are_unique_and_only_shared_samples_are_handed_over(order) -> None:
    for batches in ("fresh", "reuse_student"):
        plan = plan_cycle(5, 3, CycleSettings(order=order, fake_batches=batches))
        assert len({r.name for r in plan}) == 4
        shared = batches == "reuse_student"
        assert [r.hands_over for r in plan] == [shared, False, False, False]
        assert {r.rollout for r in plan} == ({"student"} if shared else {r.name for r in plan})


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [1, 3])
def test_a_cycle_takes_exactly_one_student_and_k_fake_steps(
    build_worker, dmd2, storage, k, order, micro
) -> None:
    worker = build_worker(dmd2(fake_updates_per_student=k), storage, micro_batch_size=micro)
    steps = dict.fromkeys(("student", "fake_score"), 0)
    for name in steps:
        optimizer = worker.roles[name].optimizer

        def count(*args, name=name, **kwargs) -> None:
            steps[name] += 1

        optimizer.register_step_post_hook(count)
    for cycle in (1, 2):
        results = run_cycle(worker, cycle, k, CycleSettings(order=order))
        assert all(r.updated for r in results)
        assert steps == {"student": cycle, "fake_score": cycle * k}
        assert worker.roles["student"].successful == cycle
        assert worker.roles["fake_score"].successful == cycle * k


def test_gradients_are_gone_between_phases(build_worker, dmd2, storage) -> None:
    worker = build_worker(dmd2(), storage, micro_batch_size=3)
    for request in plan_cycle(1, 2, CycleSettings()):
        for role in worker.roles.values():
            assert all(p.grad is None for p in role.tensors)
        worker.run_phase(request)
    for network in worker.roles.storage.networks.values():
        assert all(p.grad is None for p in network.parameters())


def test_a_left_over_gradient_of_the_own_role_does_not_enter_the_update(build_worker, dmd2) -> None:
    def update(disturb: bool) -> list[torch.Tensor]:
        worker = build_worker(dmd2())
        if disturb:
            for p in worker.roles["student"].tensors:
                p.grad = torch.ones_like(p)
        worker.run_phase(PhaseRequest(1, "student", "student", "student"))
        return worker.roles["student"].tensors

    for a, b in zip(update(False), update(True), strict=True):
        assert torch.equal(a, b)


class Spy:
    """Sees the student's calls, and the samples that every phase works on."""

    def __init__(self, worker, monkeypatch) -> None:
        self.calls = 0
        self.samples: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.draws: list[str] = []
        method = worker.method
        worker.roles.storage.module("student").register_forward_pre_hook(self.count)
        monkeypatch.setattr(method, "student_loss", partial(self.student, method.student_loss))
        monkeypatch.setattr(method, "fake_score_loss", partial(self.fake, method.fake_score_loss))

    def count(self, *args) -> None:
        self.calls += 1

    def student(self, original, roles, simulation, draw, target):
        loss = original(roles, simulation, draw, target)
        self.samples[draw.phase].append(loss.outputs["x0"])
        return loss

    def fake(self, original, roles, x0, batch, draw):
        self.samples[draw.phase].append(x0)
        assert not x0.requires_grad
        return original(roles, x0, batch, draw)

    def phases(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat(parts) for name, parts in self.samples.items()}


def exit_calls(cycle: int, phase: str, steps: int = 3) -> int:
    return Draw(11, cycle, phase).choice("exit", steps) + 1


@pytest.mark.parametrize("micro", [None, 3, 1])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("warmup", [0, 1])
def test_reused_samples_are_bit_equal_in_all_phases(
    build_worker, dmd2, monkeypatch, order, micro, warmup
) -> None:
    settings = CycleSettings(order=order, fake_batches="reuse_student", warmup_cycles=warmup)
    for cycle in (1, 2, 3):
        worker = build_worker(dmd2(), micro_batch_size=micro)
        spy = Spy(worker, monkeypatch)
        run_cycle(worker, cycle, 2, settings)
        first, *others = spy.phases().values()
        assert len(others) == (2 if cycle > warmup else 1)
        for other in others:
            assert torch.equal(other, first)
        parts = 1 if micro is None else -(-8 // micro)
        once = exit_calls(cycle, "student") * parts
        # After fake_score phases the student runs again, with a graph.
        twice = order == "fake_score_first" and cycle > warmup
        assert spy.calls == (2 * once if twice else once)


@pytest.mark.parametrize("order", ORDERS)
def test_fresh_samples_differ_between_phases(build_worker, dmd2, monkeypatch, order) -> None:
    seen: set[int] = set()
    for cycle in range(1, 7):
        worker = build_worker(dmd2())
        spy = Spy(worker, monkeypatch)
        run_cycle(worker, cycle, 2, CycleSettings(order=order))
        found = list(spy.phases().values())
        assert len(found) == 3
        for i, a in enumerate(found):
            for b in found[:i]:
                assert not torch.isclose(a, b).any()
        expected = [exit_calls(cycle, p) for p in ("student", "fake_score/0", "fake_score/1")]
        assert spy.calls == sum(expected)
        seen |= set(expected)
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("batches", ["fresh", "reuse_student"])
def test_a_shared_base_makes_the_same_number_of_student_calls(build_worker, dmd2, batches) -> None:
    worker = build_worker(dmd2(), "shared_base")
    roles, counted = worker.roles, []
    roles.storage.networks["base"].register_forward_pre_hook(
        lambda *args: counted.append(roles._active)
    )
    run_cycle(worker, 1, 2, CycleSettings(fake_batches=batches))
    phases = ["student"] if batches == "reuse_student" else ["student", "fake_score/0"]
    phases += ["fake_score/1"] if batches == "fresh" else []
    assert counted.count("student") == sum(exit_calls(1, p) for p in phases)
    assert counted.count("fake_score") == 3
    assert counted.count("teacher_score") == 1
