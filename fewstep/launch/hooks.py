"""What a run does after each cycle: log, watch, validate, call back, save."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from fewstep.checkpoint import (
    checkpoint_path,
    is_complete,
    prune_checkpoints,
    read_best,
    save_checkpoint,
    write_best,
)
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
    if recipe.validation is not None and evaluator is not None:
        hooks.append(
            ValidationHook(
                recipe.validation,
                roles,
                run.method.sampler(),
                evaluator,
                metrics,
                last,
                known_best(run.directory),
                saver.save_best,
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
        dataset, content = worker.batches.dataset, hashlib.sha256()
        for tensor in (dataset.samples, dataset.labels):
            if tensor is not None:
                content.update(tensor.detach().cpu().numpy().tobytes())
        found["data.sha256"] = content.hexdigest()
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
    """Saves on schedule and when the student is the best so far, then prunes."""

    def __init__(self, run: Run) -> None:
        """`run`: whose state is saved."""
        self._run = run
        self._saved: int | None = None
        self._fingerprint = json.dumps(run_fingerprint(run.recipe, run.worker), indent=1)

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        if cycle % self._run.recipe.checkpoint.every == 0:
            self.save(cycle)

    def save_best(self, cycle: int, best: dict[str, Any]) -> None:
        """Save the cycle and name it the best."""
        self.save(cycle, prune=False)
        write_best(self._run.directory, best)
        prune_checkpoints(self._run.directory, self._run.recipe.checkpoint.keep)

    def save(self, cycle: int, prune: bool = True) -> None:
        """Save the state after `cycle`, once."""
        if self._saved != cycle:
            recipe = self._run.recipe
            documents = {
                RECIPE: dump_recipe(recipe),
                FINGERPRINT: self._fingerprint,
            }
            save_checkpoint(self._run.directory, cycle, self._run.worker.state_dict(), documents)
            self._saved = cycle
        if prune:
            prune_checkpoints(self._run.directory, self._run.recipe.checkpoint.keep)
