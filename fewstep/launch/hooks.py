"""What a run does after each cycle: log, watch, validate, call back, save."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from fewstep.checkpoint import Saver, checkpoint_path, is_complete, read_best
from fewstep.config import Recipe, dump_recipe, fingerprint
from fewstep.data.batches import DataBatches
from fewstep.evaluation import Evaluator
from fewstep.run import RECIPE, Run
from fewstep.training.loop import Hook
from fewstep.training.metrics import DriftMonitor, LoggingHook, Metrics
from fewstep.training.phase import PhaseResult
from fewstep.training.worker import Worker
from fewstep.validation import ValidationHook

FINGERPRINT = "fingerprint.json"

OnCycle = Callable[[int, Sequence[PhaseResult]], None]


def build_hooks(
    run: Run,
    reference: dict[str, float] | None,
    evaluator: Evaluator | None,
    metrics: Metrics,
    on_cycle: OnCycle | None,
    saver: CheckpointHook,
) -> list[Hook]:
    """What happens after each cycle: log, watch, validate, call back, save (in this order)."""
    recipe, roles, last = run.recipe, run.roles, run.recipe.train.cycles
    hooks: list[Hook] = [LoggingHook(metrics, recipe.logging, last)]
    if reference is not None:
        metrics.write("reference", 0, run.cycle, reference)
        hooks.append(DriftMonitor(metrics, reference))
    if recipe.validation is not None:
        hooks.append(
            ValidationHook(
                recipe.validation,
                roles,
                run.method.sampler(),
                evaluator,
                metrics,
                last,
                run.worker.ranks.tell(lambda: known_best(run.directory)),
                saver.save_best,
                run.worker.ranks,
            )
        )
    if on_cycle is not None:
        hooks.append(CallbackHook(on_cycle))
    return [*hooks, saver]


def known_best(directory: Path) -> dict[str, Any] | None:
    """The best validation so far, unless its checkpoint is gone."""
    best = read_best(directory)
    if best is None or not is_complete(checkpoint_path(directory, best["cycle"])):
        return None
    return best


def run_fingerprint(recipe: Recipe, worker: Worker) -> dict[str, Any]:
    """What must not change: of the recipe, and of the data that the run trains on."""
    found = fingerprint(recipe)
    if isinstance(worker.batches, DataBatches):
        found["data.sha256"] = worker.batches.sha256
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


@final
class CheckpointHook:
    """Saves on schedule and when the student is the best so far; every rank has one.

    As a context, it sees to it that what is being written in the background is published.
    """

    def __init__(self, run: Run) -> None:
        """`run`: whose state is saved."""
        self._run = run
        self._saver = Saver(
            run.directory,
            run.recipe.checkpoint,
            run.worker.ranks,
            run.recipe.launch.timeout_seconds,
        )
        self._saved: int | None = None
        self._documents = {
            RECIPE: dump_recipe(run.recipe),
            FINGERPRINT: json.dumps(run_fingerprint(run.recipe, run.worker), indent=1),
        }

    def __enter__(self) -> CheckpointHook:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Ranks that fail do not all fail here: they must not wait for one another.
            if kind is None or self._run.worker.ranks.size == 1:
                self.finish()
        finally:
            self._saver.close()

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        self._saver.poll()
        if cycle % self._run.recipe.checkpoint.every == 0:
            self.save(cycle)

    def save_best(self, cycle: int, best: dict[str, Any]) -> None:
        """Save the cycle and name it the best."""
        self.save(cycle)
        self._saver.name_best(best)

    def save(self, cycle: int) -> None:
        """Save the state after `cycle`, once."""
        if self._saved != cycle:
            self._saver.save(cycle, self._run.worker.state_dict(), self._documents)
            self._saved = cycle

    def finish(self) -> None:
        """Wait for what is being written in the background, and publish it."""
        self._saver.finish()
