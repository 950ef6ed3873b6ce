"""Cycles through an executor, and stopping."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

import pytest

from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import StopRequest, run_cycle, train_cycles
from fewstep.training.phase import PhaseRequest, PhaseResult


class Recorder:
    """An executor that notes requests; also a hook."""

    def __init__(self) -> None:
        self.requests: list[PhaseRequest] = []
        self.cycles: list[int] = []

    def run_phases(self, requests: Sequence[PhaseRequest]) -> list[PhaseResult]:
        self.requests.extend(requests)
        return [PhaseResult(request, True, 1, {}) for request in requests]

    def after_cycle(self, cycle, results) -> None:
        self.cycles.append(cycle)


def test_the_phases_of_a_cycle_are_run_in_order() -> None:
    executor, settings = Recorder(), CycleSettings(order="fake_score_first")
    for cycle in (1, 2):
        results = run_cycle(executor, cycle, 2, settings)
        assert [r.request for r in results] == executor.requests[-3:]
    names = ["fake_score/0", "fake_score/1", "student"]
    assert [(r.cycle, r.name) for r in executor.requests] == [(c, n) for c in (1, 2) for n in names]


def test_hooks_run_after_each_cycle_in_order() -> None:
    executor, order = Recorder(), []

    class Hook:
        def __init__(self, name: str) -> None:
            self.name = name

        def after_cycle(self, cycle, results) -> None:
            order.append((self.name, cycle, len(results)))

    hooks = [Hook("a"), Hook("b")]
    done = train_cycles(executor, range(3, 5), 1, CycleSettings(), hooks, StopRequest())
    assert done == 4
    assert order == [("a", 3, 2), ("b", 3, 2), ("a", 4, 2), ("b", 4, 2)]


def test_a_stop_ends_after_the_current_cycle() -> None:
    executor, stop = Recorder(), StopRequest()

    class Stop:
        def after_cycle(self, cycle, results) -> None:
            stop.requested = cycle == 2

    hooks = [Stop(), executor]
    assert train_cycles(executor, range(1, 9), 1, CycleSettings(), hooks, stop) == 2
    assert executor.cycles == [1, 2]
    assert train_cycles(executor, range(3, 9), 1, CycleSettings(), [], stop) == 2


def test_the_first_interrupt_asks_and_the_second_interrupts() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop.on_interrupt():  # noqa: PT012
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    for interrupt in (False, True):
        with StopRequest().on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not before
            if interrupt:
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def body() -> None:
        with StopRequest().on_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [before]
