"""The directory of a run: looked at, begun, and gone on with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from fewstep.checkpoint import (
    checkpoint_cycle,
    checkpoints_directory,
    complete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)
from fewstep.config import Recipe, check_fingerprint, dump_recipe, load_recipe
from fewstep.errors import UserError
from fewstep.files import check_place, saving
from fewstep.launch.hooks import FINGERPRINT, run_fingerprint
from fewstep.launch.lock import RunLock
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.pretrained import RECIPE, is_run_directory
from fewstep.training.metrics import Metrics, logger, open_metrics
from fewstep.training.worker import Worker

Resume = bool | Literal["auto"]
TIMELINE = "timeline.json"


def look_at_directory(directory: Path, resuming: Resume, lock: RunLock) -> bool:
    """Whether the run is gone on with; rank 0 alone looks, others may see an older listing.

    Raises:
        UserError: unless it can be started, or gone on with.
    """
    with saving(directory):
        lock.check()
    resume = is_resumed(directory, resuming)
    check_directory(directory, resume)
    if resume:
        with saving(directory):
            lock.acquire()
    return resume


def open_directory(
    recipe: Recipe, start: int, resume: bool, lock: RunLock, ranks: Ranks = SINGLE
) -> Metrics:
    """Make the run directory and write the recipe into it; rank 0 alone does that.

    Args:
        recipe: resolved.
        start: the cycle that the run goes on from.
        resume: whether it does.
        lock: of the directory.
        ranks: that share the run.
    """
    if not ranks.first:
        return Metrics([])
    directory = Path(recipe.run_dir)
    with saving(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        if not resume:
            check_directory(directory, resume)  # another may have been quicker
            remove_unsaved(directory)
        metrics = open_metrics(recipe.logging, directory, start)
    try:
        with saving(directory):
            write_recipe(directory, recipe)
    except BaseException:
        metrics.close()
        raise
    return metrics


def is_resumed(directory: Path, resume: Resume) -> bool:
    """Whether a run is gone on with; raises UserError for what says neither yes nor no."""
    if resume not in (True, False, "auto"):
        raise UserError(f"resume: {resume!r} is given; it should be True, False or 'auto'")
    return bool(complete_checkpoints(directory)) if resume == "auto" else bool(resume)


def check_directory(directory: Path, resume: bool) -> None:
    """Raise UserError unless a run can be started, or resumed, in the directory."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"run_dir: {directory} is a file; name a directory")
    cycles = [checkpoint_cycle(c) for c in complete_checkpoints(directory)]
    if resume and not cycles:
        raise UserError(
            f"run_dir: {directory} holds no complete checkpoint to go on from; start it without "
            f"--resume"
        )
    if cycles and not resume:
        raise UserError(
            f"run_dir: {directory} holds a run already (up to cycle {cycles[-1]}); go on with "
            f"--resume, or choose another directory with --run-dir"
        )
    check_place(directory, "run_dir")


def remove_unsaved(directory: Path) -> None:
    """Clear away what a run that ended before its first checkpoint has left: its records."""
    if is_run_directory(directory):
        logger.warning(
            "%s holds a run already, which ended before its first checkpoint: starting it anew",
            directory,
        )
    for file in (
        directory / RECIPE,
        directory / "metrics.jsonl",
        directory / TIMELINE,
        checkpoints_directory(directory) / "best.json",
    ):
        file.unlink(missing_ok=True)


def resumed_recipe(directory: Path) -> Recipe | None:
    """The recipe that a run directory holds."""
    return load_recipe(directory / RECIPE) if is_run_directory(directory) else None


def restore(directory: Path, recipe: Recipe, worker: Worker) -> int:
    """Load the latest checkpoint into a worker; the cycle it was saved after.

    Raises:
        UserError: where it is damaged, or the recipe has changed in a way that matters.
    """
    checkpoint = worker.ranks.tell(lambda: latest_checkpoint(directory))
    saved = read_fingerprint(checkpoint)
    check_fingerprint(saved, run_fingerprint(recipe, worker), checkpoint)
    state = load_checkpoint(checkpoint, worker.empty_state, worker.ranks)
    worker.load_state_dict(state)
    return int(state["cycle"])


def read_fingerprint(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint's run was, before all of the checkpoint is read and checked.

    Raises:
        UserError: where it is damaged.
    """
    file = checkpoint / FINGERPRINT
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        verify_checkpoint(checkpoint)
        raise UserError(f"{file} cannot be read: {error}") from error
    return found


def write_recipe(directory: Path, recipe: Recipe) -> None:
    """Write the resolved recipe into the run directory, atomically."""
    temporary = directory / f".{RECIPE}.tmp"
    temporary.write_text(dump_recipe(recipe))
    os.replace(temporary, directory / RECIPE)
