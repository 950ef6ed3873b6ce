"""The training loop: cycles of phases through an executor, with hooks after each cycle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Protocol, final

from torch import Tensor

from fewstep.training.cycle import CycleSettings, plan_cycle
from fewstep.training.phase import Executor, PhaseResult


class Hook(Protocol):
    """Something that happens after each cycle: logging, validation, saving."""

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """Called once the last phase of `cycle` has finished."""
        ...


@final
class StopRequest:
    """Whether somebody asked the run to stop after the current cycle."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.requested = False

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Let the first Ctrl-C finish the cycle; a second one interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def handle(signum: int, frame: FrameType | None) -> None:
            self.requested = True
            signal.signal(signal.SIGINT, previous)

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def run_cycle(
    executor: Executor, cycle: int, fake_updates_per_student: int, settings: CycleSettings
) -> list[PhaseResult]:
    """Run the phases of one cycle in order, handing the outputs of earlier ones to later ones."""
    results: list[PhaseResult] = []
    handed_over: dict[str, Tensor] = {}
    for request in plan_cycle(cycle, fake_updates_per_student, settings):
        result = executor.run_phase(replace(request, external=dict(handed_over)))
        handed_over |= result.outputs
        results.append(replace(result, outputs={}))
    return results


def train_cycles(
    executor: Executor,
    cycles: range,
    fake_updates_per_student: int,
    settings: CycleSettings,
    hooks: Sequence[Hook],
    stop: StopRequest,
    agree: Callable[[bool], bool] = bool,
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

    Returns:
        The last cycle that was completed (`cycles.start - 1` if none).
    """
    done = cycles.start - 1
    for cycle in cycles:
        if agree(stop.requested):
            break
        results = run_cycle(executor, cycle, fake_updates_per_student, settings)
        done = cycle
        for hook in hooks:
            hook.after_cycle(cycle, results)
    return done
