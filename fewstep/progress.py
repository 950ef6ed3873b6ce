"""Progress bars for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fewstep.data.encode import OnProgress
from fewstep.launch.hooks import OnCycle
from fewstep.training.phase import PhaseResult


def counting_columns() -> tuple[ProgressColumn, ...]:
    """What is done, how much of it, and the time: of a bar of its own."""
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


@contextmanager
def training_progress(console: Console, title: str, cycles: int) -> Iterator[OnCycle]:
    """A bar over cycles with each role's latest loss; yields the callback that moves it."""
    losses_column = TextColumn("{task.fields[losses]}", style="dim")
    progress = Progress(*counting_columns(), losses_column, console=console, disable=console.quiet)
    task = progress.add_task(title, total=cycles, losses="")
    losses: dict[str, float] = {}

    def on_cycle(cycle: int, results: Sequence[PhaseResult]) -> None:
        progress.start()
        losses.update({r.request.role: r.metrics["loss"] for r in results})
        text = "  ".join(f"{role} {loss:.4g}" for role, loss in losses.items())
        progress.update(task, completed=cycle, losses=text)

    try:
        yield on_cycle
    finally:
        progress.stop()


@contextmanager
def encoding_progress(console: Console) -> Iterator[OnProgress]:
    """A bar over items; yields the callback that moves it."""
    progress = Progress(*counting_columns(), console=console, disable=console.quiet)
    task = progress.add_task("encode")

    def on_progress(done: float, total: int) -> None:
        if done < total:
            progress.start()
        progress.update(task, completed=int(done), total=total)

    try:
        yield on_progress
    finally:
        progress.stop()
