"""What the command `train` does around a run: its arguments, its processes, its last words."""

from __future__ import annotations

import shlex
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence

from rich.console import Console

from fewstep.config import Recipe
from fewstep.errors import INTERRUPTED, TERMINATED, UserError
from fewstep.launch.directory import Resume
from fewstep.launch.hooks import OnCycle
from fewstep.launch.local import ray_driver, train
from fewstep.launch.processes import (
    Ended,
    check_launch,
    launch,
    note_exit_code,
)
from fewstep.parallel.failures import Failure, own_rank, tell_failure
from fewstep.parallel.ranks import launched_ranks, leave
from fewstep.run import Run, Trained
from fewstep.training.loop import StopRequest


def parse_resume(value: str | None) -> Resume:
    """What `--resume` says; raises UserError naming the choices."""
    choices: dict[str | None, Resume] = {None: False, "": True, "auto": "auto"}
    if value not in choices:
        raise UserError(
            f"--resume: {value!r} is given; write --resume alone, to go on from the latest "
            f"checkpoint, or --resume auto, to go on where there is one and start anew otherwise"
        )
    return choices[value]


def run_in_processes(recipe: Recipe, resume: Resume, arguments: Sequence[str]) -> Ended | None:
    """Run `fewstep train <arguments>` in the processes that a recipe asks for.

    Returns:
        How they have ended; None where it is this process that runs it, alone or as a rank.
    """
    if recipe.launch.kind == "ray" or recipe.launch.processes == 1 or launched_ranks() is not None:
        return None
    check_launch(recipe, resume)
    words = {True: ["--resume"], False: [], "auto": ["--resume", "auto"]}[resume]
    whole = ["-m", "fewstep", "train", *arguments, *words]
    return launch(whole, recipe.launch.processes, recipe.launch.grace_seconds)


def run_recipe(
    recipe: Recipe, resume: Resume, on_cycle: OnCycle, stop: StopRequest
) -> Run | Trained:
    """Train in this process, or let it drive a cluster."""
    if recipe.launch.kind == "ray":
        return ray_driver()(recipe, resume=resume, on_cycle=on_cycle, stop=stop)
    return train(recipe, resume=resume, on_cycle=on_cycle, stop=stop)


def hush(console: Console) -> None:
    """Let rank 0 alone speak to the user."""
    if launched_ranks() is not None and own_rank() != 0:
        console.quiet = True
        warnings.simplefilter("ignore")


def last_words(run: Run | Trained, arguments: Sequence[str]) -> Iterator[str]:
    """What is said of a run that has come to its end, or was stopped."""
    if run.complete and run.cycles_run == 0:
        yield (
            f"{run.directory} is complete already: all {run.cycle} cycles are done. To train on, "
            f"raise train.cycles."
        )
    elif run.complete:
        yield f"Complete: {run.cycle} cycles, in {run.directory}"
        yield "Next: " + shlex.join(
            ["fewstep", "sample", str(run.directory), "--out", "samples.png"]
        )
    else:
        yield f"Stopped and saved after cycle {run.cycle}. Go on with:"
        yield "  " + shlex.join(["fewstep", "train", *arguments, "--resume"])


def leave_together(run: Run | Trained, stop: StopRequest) -> int:
    """Wait for the other ranks at the end of a run; its exit code."""
    if launched_ranks() is not None:
        # All is saved. The launcher ends the others as soon as one has left with another code
        # than 0, which must not make them leave with yet another.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave()
    code = TERMINATED if stop.signal == signal.SIGTERM else INTERRUPTED
    note_exit_code(0 if run.complete else code)
    return 0 if run.complete else code


def told_by_another(message: str, code: int) -> Failure | None:
    """Tell the other ranks why this one ends; what one of them has told before, if it has."""
    failure = tell_failure(message, code)
    return failure if failure is not None and failure.rank != own_rank() else None


def unforeseen(error: BaseException) -> str:
    """The traceback of what has caused an error of a rank, if nobody has foreseen it."""
    cause = error.__cause__
    return "".join(traceback.format_exception(cause)) if cause is not None else ""
