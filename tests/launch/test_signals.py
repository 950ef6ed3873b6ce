"""Signals: what they stop, when, and with which exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from fewstep.launch.processes import launch
from fewstep.run import open_run
from fewstep.training.loop import StopRequest

LONG = ("train.cycles=100000", "checkpoint.every=100000")


def saved(tmp_path: Path, out: str) -> int:
    """The cycle after which a run says that it was saved, and was."""
    assert out.count("Stopped and saved after cycle") == 1, out
    cycle = int(out.partition("Stopped and saved after cycle ")[2].partition(".")[0])
    assert open_run(tmp_path / "run").cycle == cycle
    return cycle


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        pytest.param(signal.SIGTERM, True, 143, id="preempted"),
        pytest.param(signal.SIGINT, False, 130, id="interrupted", marks=pytest.mark.exhaustive),
    ],
)
def test_the_launcher_passes_a_signal_on_and_waits(
    start, tmp_path: Path, number: signal.Signals, to_all: bool, code: int
) -> None:
    started = start(*LONG)
    started.wait_for_cycle()
    started.process.send_signal(number)
    if to_all:  # as a scheduler does: the launcher passes it on a second time
        for pid in started.ranks():
            os.kill(pid, number)
    found, out, err = started.end()
    assert (found, err) == (code, "")
    assert saved(tmp_path, out) >= 1
    assert "launch.processes=2" in out
    assert "--resume" in out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_ctrl_c_ends_all_at_once(start, tmp_path: Path) -> None:
    started = start(*LONG, fault="spin:1:3")  # the cycle would never be finished
    started.wait_for(lambda: any(file.read_text() for file in started.pids.iterdir()))
    started.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert started.process.poll() is None
    begin = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    code, out, err = started.end()
    assert time.monotonic() - begin < 25
    assert code == 130
    assert err.count("interrupted; what was saved before is untouched") == 1
    assert "Stopped" not in out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_to_one_rank_stops_all_after_the_same_cycle(start, tmp_path: Path) -> None:
    code, out, err = start(*LONG, fault="term:1:3").end()
    assert (code, err) == (143, "")
    assert saved(tmp_path, out) == 3


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_torchrun_passes_sigterm_on(start, tmp_path: Path) -> None:
    started = start(*LONG, torchrun=True)
    started.wait_for_cycle()
    started.process.terminate()
    code, out, _ = started.end()
    assert code != 0  # torchrun's own
    assert saved(tmp_path, out) >= 1


@pytest.mark.slow
@pytest.mark.exhaustive  # it waits for longer than torch's launcher between two of its heartbeats
@pytest.mark.timeout(120)
def test_nothing_of_the_launcher_fails_behind_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def slow(handler: DynamicRendezvousHandler) -> None:
        beat(handler)
        time.sleep(3)

    beat, failed = DynamicRendezvousHandler._keep_alive, []
    monkeypatch.setattr(DynamicRendezvousHandler, "_keep_alive", slow)
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    script = tmp_path / "rank.py"
    script.write_text("import time; time.sleep(60)")
    threading.Timer(7, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert launch([str(script)], 2, 5).code == 143
    time.sleep(3)
    assert failed == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_do_not_outlive_their_launcher(
    start, is_running: Callable[[int, float], bool], tmp_path: Path
) -> None:
    started = start(*LONG)
    started.wait_for_cycle()
    ranks = started.ranks()
    started.process.kill()
    assert [pid for pid in ranks if is_running(pid, 20)] == []


def test_a_repeated_sigterm_does_not_cut_the_saving_short() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with stop.on_interrupt():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]
)
def test_another_signal_than_the_first_interrupts_at_once(numbers: tuple[int, int]) -> None:
    stop = StopRequest()
    with pytest.raises(KeyboardInterrupt), stop.on_interrupt():  # noqa: PT012
        os.kill(os.getpid(), numbers[0])
        assert stop.signal == numbers[0]
        os.kill(os.getpid(), numbers[1])


def test_a_rank_whose_run_has_failed_is_interrupted_by_the_first_sigterm() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt), stop.on_interrupt(lambda: True):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_was_stopped_lives_to_say_so(number: signal.Signals) -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    try:
        with stop.on_interrupt(lambda: False):
            os.kill(os.getpid(), number)
        left = signal.getsignal(signal.SIGTERM)
        assert left == (signal.SIG_IGN if number == signal.SIGTERM else before)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_rank_that_fails_is_not_ended_before_it_has_said_why() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ValueError, match="why"), stop.on_interrupt(lambda: False):
            raise ValueError("why")
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
    finally:
        signal.signal(signal.SIGTERM, before)
