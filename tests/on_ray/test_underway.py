"""Calls that are sent before those before them are done: their order, and what fails first."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fewstep.errors import TrainingError
from fewstep.launch.ray.calls import Call
from fewstep.launch.ray.pool import ATTEMPTS, RolloutPool
from fewstep.launch.ray.trainer import TrainerProcess
from fewstep.launch.ray.underway import Reply, Underway
from fewstep.parallel.offload import Offload
from fewstep.parallel.ranks import CPU
from fewstep.training.phase import PhaseRequest
from fewstep.training.timeline import Span

NOTHING = PhaseRequest(1, "student", "student", "student")


class Process:
    """Does things that take a while, and remembers when."""

    def __init__(self) -> None:
        self.done: list[tuple[str, float, float]] = []

    def work(self, name: str, seconds: float, *_: object) -> Reply:
        begin = time.time()
        time.sleep(seconds)
        if name == "broken":
            raise ValueError(name)
        self.done.append((name, begin, time.time()))
        return Reply(name, (Span(name, "a/0", "train", 1, begin, seconds),))

    def said(self) -> list[tuple[str, float, float]]:
        return self.done


@pytest.fixture
def processes(cluster: None) -> Any:
    """Two, which Ray has started."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # they cannot import it
    found = [ray.remote(num_cpus=0)(Process).remote() for _ in range(2)]
    ray.get([process.said.remote() for process in found])
    yield found
    for process in found:
        ray.kill(process)


def send(
    underway: Underway, group: str, processes: Any, name: str, seconds: Any, *first: Any
) -> Any:
    before = underway.before(group)
    return underway.send(
        group,
        [
            Call(p.work.remote(name, s, *first, *before), f"{group}/{rank}", name)
            for rank, (p, s) in enumerate(zip(processes, seconds, strict=True))
        ],
    )


@pytest.mark.slow
def test_a_group_begins_when_all_ranks_of_the_one_before_have_finished(processes: Any) -> None:
    spans: list[Span] = []
    underway = Underway(60, spans.extend)
    first, other = processes
    # Its rank 1 is slow, and it is not rank 1 that is called next.
    send(underway, "a", [first], "one", [0.0])
    send(underway, "b", [other, first], "two", [0.6, 0.0])
    last = send(underway, "a", [first], "three", [0.0])
    assert underway.before("a") == []
    assert len(underway.before("b")) == 1
    assert last.answers() == ["three"]
    assert [s.name for s in spans] == ["one", "two", "two", "three"]
    did = {name: (begin, end) for name, begin, end in ray.get(other.said.remote())}
    names, begins, _ = zip(*ray.get(first.said.remote()), strict=True)
    assert names == ("one", "two", "three")
    assert begins[2] >= did["two"][1]
    assert underway.before("b") == []  # nothing is on its way


@pytest.mark.slow
def test_a_call_that_waits_for_something_is_not_overtaken(processes: Any) -> None:
    underway = Underway(60, lambda spans: None)
    first, other = processes
    slow = other.work.remote("slow", 0.4)
    send(underway, "a", [first], "one", [0.0], slow)
    send(underway, "a", [first], "two", [0.0]).answers()
    assert [name for name, _, _ in ray.get(first.said.remote())] == ["one", "two"]


@pytest.mark.slow
def test_what_fails_first_is_told_and_nothing_waits_for_what_follows(processes: Any) -> None:
    underway = Underway(60, lambda spans: None)
    first, other = processes
    send(underway, "a", [first], "one", [0.0])
    send(underway, "a", [first], "broken", [0.0])
    last = send(underway, "b", [other], "three", [0.0])
    with pytest.raises(TrainingError, match=r"^group a, rank 0, broken: ValueError: broken"):
        last.answers()
    underway.settle()
    assert ray.get(other.said.remote()) == []  # it was not done


@pytest.mark.slow
def test_what_follows_on_all_ranks_or_on_none_is_done_by_none(processes: Any) -> None:
    underway = Underway(60, lambda spans: None)
    first, other = processes
    lost = other.work.remote("broken", 0.0)
    refs = [first.work.remote("phase", 0.0), other.work.remote("phase", 0.0, lost)]
    sent = [Call(ref, f"b/{rank}", "phase") for rank, ref in enumerate(refs)]
    underway.send("b", sent)
    assert underway.before("b") == []
    last = underway.last()
    pushed = [process.work.remote("push", 0.0, *last) for process in processes]
    underway.send("b", [Call(ref, f"b/{rank}", "push") for rank, ref in enumerate(pushed)])
    with pytest.raises(TrainingError, match=r"^group b, rank 1, phase"):
        underway.settle()
    done = [[name for name, _, _ in ray.get(process.said.remote())] for process in processes]
    assert done == [["phase"], []]


def test_a_worker_that_takes_no_weights_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, waits = [], []

    class Silent:
        """Stands for a rollout worker that answers nothing: only what it is sent is looked at."""

        def __getattr__(self, method: str) -> Any:
            remote = lambda *what: loads.append(method) or object()  # noqa: E731
            return SimpleNamespace(remote=remote)

    def wait(refs: Any, *, num_returns: int, timeout: float) -> Any:
        waits.append(num_returns)
        return [], refs

    def push(take: Any) -> Any:
        for portion in range(5):
            take(portion)
        return SimpleNamespace(answers=lambda: [None])

    pool = object.__new__(RolloutPool)
    pool._actors, pool._timeout, pool._last_loss = [Silent(), Silent()], 1.0, "silent"
    monkeypatch.setattr("fewstep.launch.ray.pool.ray.wait", wait)
    monkeypatch.setattr(pool, "_lost", lambda calls, what: [0, 1], raising=False)
    monkeypatch.setattr(pool, "_restart", lambda lost: None, raising=False)
    with pytest.raises(TrainingError, match="lost 3 times in a row at new weights"):
        pool.deliver(push, 1)
    assert waits == [2] * ATTEMPTS
    assert loads.count("load_weights") == 2 * ATTEMPTS


@pytest.mark.slow
def test_samples_are_not_waited_for_once_a_group_has_failed(processes: Any) -> None:
    underway = Underway(60, lambda spans: None)
    first, other = processes
    soon, late = other.work.remote("soon", 0.2), other.work.remote("late", 20)
    send(underway, "a", [first], "one", [0.0])
    assert underway.wait_beside([soon, late], 60) == ([soon], [late])
    assert underway.wait_beside([late], 0.1) == ([], [late])
    send(underway, "a", [first], "broken", [0.0])
    begin = time.monotonic()
    with pytest.raises(TrainingError, match=r"^group a, rank 0, broken: ValueError"):
        underway.wait_beside([late], 60)
    assert time.monotonic() - begin < 10


def test_a_rank_that_has_failed_does_nothing_that_was_sent_after(
    make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PhaseRequest] = []

    class Broken:
        """A worker that can do nothing."""

        def run_phase(self, request: PhaseRequest) -> None:
            asked.append(request)
            raise ValueError("out of luck")

    monkeypatch.setattr("logging.Logger.setLevel", lambda self, level: None)
    process = TrainerProcess("a", 0, 1, make_recipe("dmd2", {"runtime.threads": 1}))
    process._worker = Broken()  # type: ignore[assignment]
    process._offload = Offload(CPU, list)
    now = range(1)
    with pytest.raises(ValueError, match="out of luck"):
        process.run_phase(NOTHING, None, now)
    with pytest.raises(TrainingError, match="an earlier call has failed"):
        process.run_phase(NOTHING, None, now)
    with pytest.raises(TrainingError, match="an earlier call has failed"):
        process.push("student", 0, 1)
    assert len(asked) == 1


def test_nothing_is_done_with_weights_that_are_away(
    make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.Logger.setLevel", lambda self, level: None)
    process = TrainerProcess("a", 0, 1, make_recipe("dmd2", {"runtime.threads": 1}))
    process._offload = Offload(CPU, list)
    process._offload.sleep()
    for ask in (
        lambda: process.run_phase(NOTHING, None, range(1)),
        lambda: process.push("student", 0, 1),
    ):
        process._failed = False
        with pytest.raises(TrainingError, match="in main memory"):
            ask()
