"""All run state, once, atomically.

A checkpoint is a directory `checkpoints/cycle_000100` that appears whole or not at all: it is
written under a temporary name, flushed to disk, and renamed. Its manifest, written last, lists
every file with size and SHA-256; a directory without a complete manifest does not exist for
resume. Tensors are safetensors, the rest is JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, final

from pydantic import Field, ValidationError
from safetensors.torch import load_file

from fewstep.errors import UserError
from fewstep.files import (
    describe_files,
    digest,
    saving,
    sync_directory,
    write_file,
    write_tensors,
)
from fewstep.settings import Settings

MANIFEST = "manifest.json"
_NAME = re.compile(r"cycle_(\d{6,})")
_TEMPORARY = re.compile(r"\.cycle_\d{6,}\.tmp")


@final
class CheckpointSettings(Settings):
    """When run state is saved, and how much of it is kept."""

    every: Annotated[int, Field(gt=0)] = Field(
        100, description="cycles between checkpoints; the last cycle is always saved"
    )
    keep: Annotated[int, Field(ge=1)] = Field(
        2, description="newest checkpoints that are kept, besides the best one"
    )


@final
class Best(Settings):
    """What best.json says: the best validation so far."""

    cycle: Annotated[int, Field(ge=1)]
    metric: str
    value: float


def checkpoints_directory(run_directory: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_directory / "checkpoints"


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


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]] | None:
    """File -> size and SHA-256, or None where the checkpoint is not complete.

    Raises:
        UserError: where the manifest is damaged.
    """
    file = checkpoint / MANIFEST
    if not is_complete(checkpoint):
        return None
    try:
        files = json.loads(file.read_text())["files"]
        return {f: {"size": e["size"], "sha256": e["sha256"]} for f, e in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged and cannot be read: {error}{_go_back(file)}") from error


def _go_back(file: Path) -> str:
    checkpoint = next(p for p in file.parents if _NAME.fullmatch(p.name) or p == p.parent)
    return f". Remove {checkpoint} to go on from the checkpoint before it"


def complete_checkpoints(run_directory: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    found = [
        path
        for path in checkpoints_directory(run_directory).glob("cycle_*")
        if _NAME.fullmatch(path.name) and is_complete(path)
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
            f"{run_directory} has no best checkpoint: no validation was run; use 'latest'"
        )
    path = checkpoint_path(run_directory, best["cycle"])
    if not is_complete(path):
        raise UserError(f"the best checkpoint {path} is missing or incomplete")
    return path


def checkpoint_path(run_directory: Path, cycle: int) -> Path:
    """Where the checkpoint after `cycle` belongs."""
    return checkpoints_directory(run_directory) / f"cycle_{cycle:06d}"


def save_checkpoint(
    run_directory: Path,
    cycle: int,
    state: Mapping[str, Any],
    documents: Mapping[str, str],
) -> Path:
    """Write all run state and publish it under its name.

    Args:
        run_directory: of the run.
        cycle: the last one completed.
        state: "networks" and "optimizers" hold tensors by name and key; every other entry is
            plain data for JSON.
        documents: further text files, e.g. the recipe.

    Returns:
        The checkpoint.

    Raises:
        UserError: where it cannot be written; nothing is published or left behind then.
    """
    target = checkpoint_path(run_directory, cycle)
    temporary = target.parent / f".{target.name}.tmp"
    with saving(target, lambda: shutil.rmtree(temporary, ignore_errors=True)):
        remove_leftovers(run_directory)
        temporary.mkdir(parents=True)
        for section in ("networks", "optimizers"):
            (temporary / section).mkdir()
            for name, tensors in state[section].items():
                write_tensors(temporary / section / f"{name}.safetensors", tensors)
        plain = {k: v for k, v in state.items() if k not in ("networks", "optimizers")}
        texts = {**documents, "state.json": json.dumps({**plain, "cycle": cycle}, indent=1)}
        for name, text in texts.items():
            write_file(temporary / name, text.encode())
        manifest = json.dumps({"files": describe_files(temporary)}, indent=1)
        write_file(temporary / MANIFEST, manifest.encode())
        for directory in (temporary / "networks", temporary / "optimizers", temporary):
            sync_directory(directory)
        if target.exists():
            remove_checkpoint(target)
        os.rename(temporary, target)
        sync_directory(target.parent)
    return target


def load_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """The state that `save_checkpoint` was given, every byte checked against the manifest.

    Raises:
        UserError: naming the file that is missing, extra or damaged.
    """
    if not checkpoint.is_dir():
        raise UserError(f"the checkpoint {checkpoint} does not exist")
    verify_checkpoint(checkpoint)
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    for section in ("networks", "optimizers"):
        files = sorted((checkpoint / section).glob("*.safetensors"))
        state[section] = {file.stem: load_file(file) for file in files}
    return state


def verify_checkpoint(checkpoint: Path) -> None:
    """Compare every file with the manifest; raises UserError naming what is wrong."""
    files = read_manifest(checkpoint)
    if files is None:
        raise UserError(f"{checkpoint} has no {MANIFEST}: it is incomplete")
    present = {str(f.relative_to(checkpoint)) for f in checkpoint.rglob("*") if f.is_file()} - {
        MANIFEST
    }
    if missing := sorted(set(files) - present):
        names = ", ".join(missing)
        raise UserError(f"{checkpoint} lacks {names}{_go_back(checkpoint / MANIFEST)}")
    if extra := sorted(present - set(files)):
        raise UserError(f"{checkpoint} has files that its manifest does not list: {extra}")
    for name, entry in files.items():
        file = checkpoint / name
        if file.stat().st_size != entry["size"]:
            raise UserError(
                f"{file} has {file.stat().st_size} bytes instead of {entry['size']}{_go_back(file)}"
            )
        if digest(file) != entry["sha256"]:
            raise UserError(
                f"{file} is damaged: its SHA-256 differs from the manifest's{_go_back(file)}"
            )


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
        unfinished = _NAME.fullmatch(path.name) and not is_complete(path)
        ours = unfinished or _TEMPORARY.fullmatch(path.name)
        if ours and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
