"""What a run does after each cycle: log, watch, validate, call back, save."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import torch

from fewstep.checkpoint import Saver, checkpoint_path, is_complete, read_best
from fewstep.config import Recipe, dump_recipe, fingerprint
from fewstep.data.batches import DataBatches
from fewstep.images import write_samples
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.pretrained import RECIPE
from fewstep.run import Run
from fewstep.sampling import Samples
from fewstep.training.loop import Hook
from fewstep.training.metrics import DriftMonitor, LoggingHook, Metrics
from fewstep.training.phase import PhaseResult
from fewstep.training.worker import Worker
from fewstep.validation import Judge, ValidationHook, ValidationSettings

FINGERPRINT = "fingerprint.json"
PICTURED = 16

OnCycle = Callable[[int, Sequence[PhaseResult]], None]


def build_hooks(
    recipe: Recipe,
    start: int,
    reference: Mapping[str, float] | None,
    sample: Callable[[ValidationSettings], Samples | None],
    judge: Judge | None,
    metrics: Metrics,
    on_cycle: OnCycle | None,
    saver: CheckpointHook,
    ranks: Ranks = SINGLE,
) -> list[Hook]:
    """What happens after each cycle: log, watch, validate, call back, save (in this order).

    Args:
        recipe: resolved.
        start: the cycle that the run goes on from.
        reference: moments of the teacher's samples, of a run that has a teacher.
        sample: gives the samples that the student is validated by.
        judge: of them, on rank 0.
        metrics: where everything is written.
        on_cycle: of the caller.
        saver: saves on schedule, and the best.
        ranks: that call the hooks together.
    """
    last, directory = recipe.train.cycles, Path(recipe.run_dir)
    hooks: list[Hook] = [LoggingHook(metrics, recipe.logging, last)]
    if reference is not None:
        metrics.write("reference", 0, start, reference)
        hooks.append(DriftMonitor(metrics, reference))
    if recipe.validation is not None:
        hooks.append(
            ValidationHook(
                recipe.validation,
                sample,
                judge,
                metrics,
                last,
                ranks.tell(lambda: known_best(directory)),
                saver.save_best,
                partial(picture_samples, directory / "validation"),
                ranks,
            )
        )
    if on_cycle is not None:
        hooks.append(CallbackHook(on_cycle))
    return [*hooks, saver]


def picture_samples(directory: Path, cycle: int, samples: Samples) -> None:
    """Write the first samples of a validation as a grid, where they are pictures."""
    images = samples.images[:PICTURED]
    if images.ndim == 4 and images.shape[1] in (1, 3) and torch.isfinite(images).all():
        write_samples(images, directory / f"cycle_{cycle:06d}.png")


def known_best(directory: Path) -> dict[str, Any] | None:
    """The best validation so far, unless its checkpoint is gone."""
    best = read_best(directory)
    if best is None or not is_complete(checkpoint_path(directory, best["cycle"])):
        return None
    return best


def run_documents(recipe: Recipe, found: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint says of its run; `found`: the run's fingerprint."""
    return {RECIPE: dump_recipe(recipe), FINGERPRINT: json.dumps(found, indent=1)}


def run_fingerprint(recipe: Recipe, worker: Worker) -> dict[str, Any]:
    """What must not change: of the recipe, and of the data that the run trains on."""
    found = fingerprint(recipe)
    if isinstance(worker.batches, DataBatches):
        found["data.sha256"] = worker.batches.items.sha256
    return found


@final
class CallbackHook:
    """A function of the caller's as a hook."""

    def __init__(self, function: OnCycle) -> None:
        """`function`: called with the cycle and its results."""
        self._function = function

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        self._function(cycle, results)


class Saves(Protocol):
    """Whatever can save the state of a run, at once or in the background."""

    def save(self, cycle: int) -> None:
        """Save the state after `cycle`; may return before it is written."""
        ...

    def name_best(self, best: Mapping[str, Any]) -> None:
        """Say which checkpoint is the best, once it is published."""
        ...

    def poll(self) -> None:
        """Publish what has been written meanwhile; called after each cycle."""
        ...

    def finish(self) -> None:
        """Wait for what is being written in the background, and publish it."""
        ...

    def close(self) -> None:
        """Let the background end."""
        ...


@final
class CheckpointHook:
    """Saves on schedule and when the student is the best so far; every rank has one.

    As a context, it sees to it that what is being written in the background is published.
    """

    def __init__(self, every: int, saves: Saves, alone: bool) -> None:
        """Prepare to save.

        Args:
            every: cycles between checkpoints.
            saves: does it.
            alone: whether no other process calls the same hook.
        """
        self._every, self._saves, self._alone = every, saves, alone
        self._saved: int | None = None

    def __enter__(self) -> CheckpointHook:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Ranks that fail do not all fail here: they must not wait for one another.
            if kind is None or self._alone:
                self._saves.finish()
        finally:
            self._saves.close()

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        self._saves.poll()
        if cycle % self._every == 0:
            self.save(cycle)

    def save_best(self, cycle: int, best: dict[str, Any]) -> None:
        """Save the cycle and name it the best."""
        self.save(cycle)
        self._saves.name_best(best)

    def save(self, cycle: int) -> None:
        """Save the state after `cycle`, once."""
        if self._saved != cycle:
            self._saves.save(cycle)
            self._saved = cycle


@final
class RunSaves:
    """Saves a run whose roles are all in this process and its peers."""

    def __init__(self, run: Run) -> None:
        """`run`: whose state is saved."""
        self._worker = run.worker
        self._saver = Saver(
            run.directory,
            run.recipe.checkpoint,
            run.worker.ranks,
            run.recipe.launch.timeout_seconds,
        )
        self._documents = run_documents(run.recipe, run_fingerprint(run.recipe, run.worker))
        self.name_best, self.poll = self._saver.name_best, self._saver.poll
        self.finish, self.close = self._saver.finish, self._saver.close

    def save(self, cycle: int) -> None:
        """See `Saves.save`."""
        self._saver.save(cycle, self._worker.state_dict(), self._documents)
