"""The checkpoints of a run: their names, which are complete, which is the best, which may go."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, final

from pydantic import Field, ValidationError

from fewstep.errors import UserError
from fewstep.files import saving, write_file
from fewstep.settings import Settings

MANIFEST = "manifest.json"
_NAME = re.compile(r"cycle_(\d{6,})")
_TEMPORARY = re.compile(r"\.cycle_\d{6,}\.tmp")


@final
class Best(Settings):
    """What best.json says: the best validation so far."""

    cycle: Annotated[int, Field(ge=1)]
    metric: str
    value: float


def checkpoints_directory(run_directory: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_directory / "checkpoints"


def checkpoint_path(run_directory: Path, cycle: int) -> Path:
    """Where the checkpoint after `cycle` belongs."""
    return checkpoints_directory(run_directory) / f"cycle_{cycle:06d}"


def temporary_path(checkpoint: Path) -> Path:
    """Where it is written before it is published."""
    return checkpoint.parent / f".{checkpoint.name}.tmp"


def published_path(draft: Path) -> Path:
    """The name that a draft will have: the opposite of `temporary_path`."""
    return draft.parent / draft.name.removeprefix(".").removesuffix(".tmp")


def is_checkpoint_name(name: str) -> bool:
    """Whether it is the name of a checkpoint, as in cycle_000100."""
    return _NAME.fullmatch(name) is not None


def checkpoint_cycle(checkpoint: Path) -> int:
    """The cycle after which it was saved."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise UserError(f"{checkpoint} is not named like a checkpoint (cycle_000100)")
    return int(match.group(1))


def is_complete(checkpoint: Path) -> bool:
    """Whether it was published whole: a manifest is the last thing written, the first removed.

    A file that went missing or changed later is damage, for `load_checkpoint` to report: an older
    checkpoint is not silently taken instead.
    """
    return (checkpoint / MANIFEST).is_file()


def complete_checkpoints(run_directory: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    found = [
        path
        for path in checkpoints_directory(run_directory).glob("cycle_*")
        if is_checkpoint_name(path.name) and is_complete(path)
    ]
    return sorted(found, key=checkpoint_cycle)


def latest_checkpoint(run_directory: Path) -> Path:
    """The newest complete checkpoint.

    Raises:
        UserError: where there is none.
    """
    found = complete_checkpoints(run_directory)
    if not found:
        raise UserError(f"{run_directory} holds no complete checkpoint")
    return found[-1]


def read_best(run_directory: Path) -> dict[str, Any] | None:
    """The best validation so far: {"cycle", "metric", "value"}, or None.

    Raises:
        UserError: where best.json cannot be read or says something else.
    """
    file = checkpoints_directory(run_directory) / "best.json"
    try:
        return Best.model_validate_json(file.read_bytes()).model_dump()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    except ValidationError as error:
        reasons = "; ".join(
            ": ".join([*map(str, e["loc"]), e["msg"]]) for e in error.errors(include_url=False)
        )
        raise UserError(
            f"{file} cannot be read: {reasons}. Removing it is safe: which checkpoint is the best "
            f"is unknown then, until the next validation"
        ) from error


def write_best(run_directory: Path, best: Mapping[str, Any]) -> None:
    """Name the best checkpoint, after it was published."""
    file = checkpoints_directory(run_directory) / "best.json"
    with saving(file):
        write_file(file.with_suffix(".tmp"), json.dumps(best).encode())
        os.replace(file.with_suffix(".tmp"), file)


def best_checkpoint(run_directory: Path) -> Path:
    """The checkpoint of the best validation.

    Raises:
        UserError: where the run was never validated or the checkpoint is gone.
    """
    best = read_best(run_directory)
    if best is None:
        raise UserError(
            f"{run_directory} has no best checkpoint: no validation with a metric was run; "
            f"use 'latest'"
        )
    path = checkpoint_path(run_directory, best["cycle"])
    if not is_complete(path):
        raise UserError(f"the best checkpoint {path} is missing or incomplete")
    return path


def prune_checkpoints(run_directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints and the best one."""
    best = read_best(run_directory)
    for path in complete_checkpoints(run_directory)[:-keep]:
        if best is None or best["cycle"] != checkpoint_cycle(path):
            remove_checkpoint(path)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; without its manifest it no longer counts if this is cut short."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def remove_leftovers(run_directory: Path) -> None:
    """Remove what a killed process left: temporary directories and incomplete checkpoints.

    Files, and directories of other names, are someone else's.
    """
    directory = checkpoints_directory(run_directory)
    (directory / "best.tmp").unlink(missing_ok=True)
    for path in [*directory.glob(".cycle_*.tmp"), *directory.glob("cycle_*")]:
        unfinished = is_checkpoint_name(path.name) and not is_complete(path)
        ours = unfinished or _TEMPORARY.fullmatch(path.name)
        if ours and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
