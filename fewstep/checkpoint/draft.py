"""A checkpoint under its temporary name: made, written in parts, published or discarded.

Several groups of processes, which do not talk to one another, write one checkpoint so: a driver
calls `open_draft`, all ranks of each group call `write_part`, and when all have done so the driver
calls `publish_draft`. A run of one group does the same steps together (see `save`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fewstep.checkpoint.directory import (
    MANIFEST,
    checkpoint_cycle,
    checkpoint_path,
    published_path,
    remove_checkpoint,
    remove_leftovers,
    temporary_path,
)
from fewstep.checkpoint.manifest import STATE, encode_manifest, encode_state
from fewstep.checkpoint.peers import Peers
from fewstep.checkpoint.tensors import TENSORS, flatten, writable, write_tensors
from fewstep.errors import TrainingError, UserError
from fewstep.files import FileEntry, saving, sync_directory, write_file
from fewstep.parallel.ranks import SINGLE, Ranks

Files = dict[str, FileEntry]
Documents = Mapping[str, str | bytes]
WHOLE = ""
"""The part of a group that is alone: it writes straight into `tensors`."""
_PART = re.compile(r"[A-Za-z0-9_-]*")


def open_draft(run_directory: Path, cycle: int, parts: Sequence[str]) -> Path:
    """Begin a checkpoint that several groups write; the driver calls this.

    Args:
        run_directory: of the run, the same directory for the driver and all ranks.
        cycle: the last one completed.
        parts: of each group the name of its folder in `tensors`; "": none of its own.

    Returns:
        The temporary directory; `discard_draft` removes it where a part cannot be written.

    Raises:
        UserError: where it cannot be written, or a name cannot be that of a folder.
    """
    for part in parts:
        if not _PART.fullmatch(part):
            raise UserError(
                f"the group {part!r} cannot have a folder of its own in a checkpoint: its name "
                f"may have letters, digits, '_' and '-' only"
            )
    target = checkpoint_path(run_directory, cycle)
    draft = temporary_path(target)
    with saving(target, lambda: discard_draft(draft)):
        make_draft(run_directory, draft, parts)
    return draft


def write_part(
    draft: Path,
    part: str,
    state: Mapping[str, Any],
    paths: Collection[str],
    ranks: Ranks = SINGLE,
) -> Files:
    """Write and flush a group's share of the tensors; every rank of the group calls this.

    The draft is not discarded where it fails: other groups may be writing.

    Args:
        draft: what `open_draft` gave.
        part: the group's.
        state: "networks" and "optimizers" of the group, whole or DTensors.
        paths: those of its tensors that it writes (see `divide`), the same on every rank.
        ranks: of the group.

    Returns:
        The files of all its ranks, named as from the checkpoint; the same on every rank.

    Raises:
        UserError: on every rank, where any cannot write.
        TrainingError: where the group does not hold one of the tensors.
    """
    peers = Peers(ranks)
    return write_held(draft, part, hold_part(draft, part, state, paths, peers), peers)


def hold_part(
    draft: Path,
    part: str,
    state: Mapping[str, Any],
    paths: Collection[str],
    peers: Peers,
    copies: bool = False,
) -> dict[str, Tensor]:
    """The first half of `write_part`; `copies`: the state may change before the second."""
    chosen, tensors = set(paths), flatten(state)
    if lacking := sorted(chosen - tensors.keys()):
        raise TrainingError(
            f"the group that writes the part {part!r} does not hold {', '.join(lacking[:4])}"
        )
    share = {path: tensor for path, tensor in tensors.items() if path in chosen}
    with saving(published_path(draft)):
        return take_hold(draft, part, share, peers, copies=copies)


def write_held(draft: Path, part: str, held: Mapping[str, Tensor], peers: Peers) -> Files:
    """The second half of `write_part`; may be called in another thread, with a group of its own."""
    with saving(published_path(draft)):
        return write_files(draft, part, held, peers)


def publish_draft(
    draft: Path, state: Mapping[str, Any], files: Files, documents: Documents
) -> Path:
    """Write what is left, the manifest last, and give the directory its name; by the driver.

    Args:
        draft: what `open_draft` gave; all groups have written their parts.
        state: what `merge_states` gave.
        files: what `write_part` gave, of all parts.
        documents: further files by name, e.g. the recipe.

    Returns:
        The checkpoint, published.

    Raises:
        UserError: where it cannot be written, or there are other tensors than those in `files`;
            nothing is published or left behind then.
    """
    target = published_path(draft)
    with saving(target, lambda: discard_draft(draft)):
        described = {**documents, STATE: encode_state(state, checkpoint_cycle(target))}
        finish_draft(draft, files, described)
    return target


def discard_draft(draft: Path) -> None:
    """Remove what was written, once nobody writes any more."""
    shutil.rmtree(draft, ignore_errors=True)


# What these, and `save`, are made of.


def make_draft(run_directory: Path, draft: Path, parts: Sequence[str] = (WHOLE,)) -> None:
    """Make the directory and its folders, and remove what a killed process left."""
    remove_leftovers(run_directory)
    (draft / TENSORS).mkdir(parents=True)
    for part in filter(None, parts):
        (draft / TENSORS / part).mkdir()


def take_hold(
    draft: Path,
    part: str,
    tensors: Mapping[str, Tensor],
    peers: Peers,
    undo: Callable[[], None] = lambda: None,
    copies: bool = False,
) -> dict[str, Tensor]:
    """The tensors as they can be written, once every rank sees the folder (see `writable`)."""
    folder = draft / TENSORS / part
    held: dict[str, Tensor] = {}

    def take() -> None:
        if not folder.is_dir():
            raise OSError(f"{folder}, made elsewhere, is not there: all ranks must share a disk")
        held.update(writable(tensors, copies))

    peers.each(take, undo)
    return held


def write_files(
    draft: Path,
    part: str,
    tensors: Mapping[str, Tensor],
    peers: Peers,
    undo: Callable[[], None] = lambda: None,
) -> Files:
    """Write and flush every rank's tensors; all files of all ranks."""
    found = peers.each(lambda: write_tensors(draft / TENSORS / part, tensors, peers), undo)
    prefix = f"{TENSORS}/{part}/" if part else f"{TENSORS}/"
    return {f"{prefix}{name}": entry for files in found for name, entry in files.items()}


def finish_draft(draft: Path, files: Files, documents: Documents) -> None:
    """Check the files, add the documents and the manifest, flush, and rename."""
    tensors = draft / TENSORS
    written = {str(f.relative_to(draft)) for f in tensors.rglob("*") if f.is_file()}
    if unknown := sorted(written - files.keys()):
        raise OSError(f"no rank has reported {', '.join(unknown)}")
    for name, entry in files.items():
        if (draft / name).stat().st_size != entry["size"]:
            raise OSError(f"{draft / name} is not as its rank has written it")
    described = {
        name: write_file(draft / name, text.encode() if isinstance(text, str) else text)
        for name, text in documents.items()
    }
    write_file(draft / MANIFEST, encode_manifest({**files, **described}))
    for directory in (*(p for p in tensors.iterdir() if p.is_dir()), tensors, draft):
        sync_directory(directory)
    target = published_path(draft)
    if target.exists():
        remove_checkpoint(target)
    os.rename(draft, target)
    sync_directory(target.parent)
