"""What a checkpoint should hold, and whether it still does, to the byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewstep.checkpoint.directory import MANIFEST, is_checkpoint_name, is_complete
from fewstep.checkpoint.peers import Peers
from fewstep.errors import UserError
from fewstep.files import FileEntry, digest

STATE = "state.json"


def encode_state(state: Mapping[str, Any], cycle: int) -> bytes:
    """The content of a checkpoint's state: `plain_state` and the cycle after which it was saved."""
    return json.dumps({**state, "cycle": cycle}, indent=1).encode()


def encode_manifest(files: Mapping[str, FileEntry]) -> bytes:
    """The content of the manifest of some files."""
    return json.dumps({"files": {f: files[f] for f in sorted(files)}}, indent=1).encode()


def read_manifest(checkpoint: Path) -> dict[str, FileEntry] | None:
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
        raise UserError(f"{file} is damaged and cannot be read: {error}{go_back(file)}") from error


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state without its tensors.

    Raises:
        UserError: where it is damaged, or of another version of this package.
    """
    file = checkpoint / STATE
    try:
        state = json.loads(file.read_text())
        names = {section: list(state["tensors"][section]) for section in ("networks", "optimizers")}
        return {**state, "cycle": int(state["cycle"]), "tensors": names}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}{go_back(file)}") from error
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint} was written by another version of fewstep, in a form that this one does "
            f"not read"
        ) from error


def verify_checkpoint(checkpoint: Path, peers: Peers | None = None) -> None:
    """Compare every file with the manifest; every rank takes a part of them.

    Raises:
        UserError: naming what is wrong, on every rank.
    """
    peers = peers or Peers()
    peers.each(lambda: _verify_part(checkpoint, peers.ranks.rank, peers.ranks.size))


def verify_state(checkpoint: Path) -> None:
    """Compare what `read_state` reads with the manifest, and nothing else.

    Raises:
        UserError: where it is damaged.
    """
    files = read_manifest(checkpoint) or {}
    if STATE not in files:
        raise UserError(f"{checkpoint / MANIFEST} does not list {STATE}: it is incomplete")
    _verify_file(checkpoint / STATE, files[STATE])


def _verify_part(checkpoint: Path, rank: int, size: int) -> None:
    if not checkpoint.is_dir():
        raise UserError(f"the checkpoint {checkpoint} does not exist")
    files = read_manifest(checkpoint)
    if files is None:
        raise UserError(f"{checkpoint} has no {MANIFEST}: it is incomplete")
    present = {str(f.relative_to(checkpoint)) for f in checkpoint.rglob("*") if f.is_file()} - {
        MANIFEST
    }
    if missing := sorted(set(files) - present):
        names = ", ".join(missing)
        raise UserError(f"{checkpoint} lacks {names}{go_back(checkpoint / MANIFEST)}")
    if extra := sorted(present - set(files)):
        raise UserError(f"{checkpoint} has files that its manifest does not list: {extra}")
    for name in sorted(files)[rank::size]:
        _verify_file(checkpoint / name, files[name])


def _verify_file(file: Path, entry: FileEntry) -> None:
    try:
        size = file.stat().st_size
        if size != entry["size"]:
            raise UserError(f"{file} has {size} bytes instead of {entry['size']}{go_back(file)}")
        found = digest(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}{go_back(file)}") from error
    if found != entry["sha256"]:
        raise UserError(
            f"{file} is damaged: its SHA-256 differs from the manifest's{go_back(file)}"
        )


def go_back(file: Path) -> str:
    """What to do about a damaged file; nothing where its checkpoint was moved out of its run."""
    for directory in file.parents:
        if is_checkpoint_name(directory.name):
            return f". Remove {directory} to go on from the checkpoint before it"
    return ""
