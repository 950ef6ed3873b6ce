"""The training loop: cycles of phases through an executor, with hooks after each cycle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, final

from fewstep.roles.role import FAKE_SCORE
from fewstep.training.cycle import CycleSettings, plan_cycle
from fewstep.training.phase import Executor, PhaseResult


class Hook(Protocol):
    """Something that happens after each cycle: logging, validation, saving."""

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """Called once the last phase of `cycle` has finished."""
        ...


@final
class StopRequest:
    """Whether somebody asked the run to stop after the current cycle.

    Attributes:
        requested: set it to stop.
        signal: by which signal it was asked, if it was by one.
    """

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.requested = False
        self.signal: signal.Signals | None = None

    @contextmanager
    def on_interrupt(self, broken: Callable[[], bool] | None = None) -> Iterator[None]:
        """Let the first Ctrl-C or SIGTERM finish the cycle.

        A second signal interrupts at once, but not a SIGTERM that repeats the first: schedulers
        send it to a launcher, which passes it on, and to its processes as well.

        Args:
            broken: in a run of several ranks, whether another has failed. Then there is no cycle
                to finish, and SIGTERM interrupts at once what this one does, or hangs in.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        def handle(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGTERM and broken is not None and broken():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                raise KeyboardInterrupt
            if self.signal == signal.SIGINT:
                raise KeyboardInterrupt
            self.requested = True
            self.signal = signal.Signals(number)
            signal.signal(signal.SIGINT, previous[signal.SIGINT])

        for each in previous:
            signal.signal(each, handle)
        try:
            yield
            if broken is not None and self.signal == signal.SIGTERM:
                # What is left is to say so, which the repetition must not cut short either.
                previous[signal.SIGTERM] = signal.SIG_IGN
        except BaseException:
            # The launcher ends the other ranks as soon as one has failed; but this one is on its
            # way out, and has to say why.
            if broken is not None:
                previous.pop(signal.SIGTERM)
            raise
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)


def run_cycle(
    executor: Executor,
    cycle: int,
    fake_updates_per_student: int,
    settings: CycleSettings,
    followers: Sequence[str] = (FAKE_SCORE,),
) -> list[PhaseResult]:
    """Run the phases of one cycle in order."""
    plan = plan_cycle(cycle, fake_updates_per_student, settings, followers)
    return executor.run_phases(plan)


def train_cycles(
    executor: Executor,
    cycles: range,
    fake_updates_per_student: int,
    settings: CycleSettings,
    hooks: Sequence[Hook],
    stop: StopRequest,
    agree: Callable[[bool], bool] = bool,
    followers: Sequence[str] = (FAKE_SCORE,),
) -> int:
    """Run cycles until the last one, or until a stop is requested.

    Args:
        executor: runs the phases.
        cycles: their numbers.
        fake_updates_per_student: K.
        settings: order, warm-up and sharing.
        hooks: what happens after each cycle.
        stop: the wish to stop of this process.
        agree: whether any process of the run wishes so: all must leave after the same cycle.
        followers: the roles that learn from the student's samples (see `plan_cycle`).

    Returns:
        The last cycle that was completed (`cycles.start - 1` if none).
    """
    done = cycles.start - 1
    for cycle in cycles:
        if agree(stop.requested):
            break
        results = run_cycle(executor, cycle, fake_updates_per_student, settings, followers)
        done = cycle
        for hook in hooks:
            hook.after_cycle(cycle, results)
    return done
