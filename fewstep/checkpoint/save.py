"""Writing a checkpoint: begun by all ranks, written by each, published by the first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from fewstep.checkpoint.directory import (
    MANIFEST,
    checkpoint_path,
    remove_checkpoint,
    remove_leftovers,
    temporary_path,
)
from fewstep.checkpoint.manifest import STATE, encode_manifest
from fewstep.checkpoint.peers import Peers
from fewstep.checkpoint.tensors import SECTIONS, TENSORS, flatten, writable, write_tensors
from fewstep.files import FileEntry, saving, sync_directory, write_file
from fewstep.parallel.ranks import SINGLE, Ranks

Files = dict[str, FileEntry]


@final
@dataclass
class Draft:
    """A checkpoint in the making, under a temporary name.

    Attributes:
        target: the name that it will have.
        texts: its other files.
        tensors: by "<section>/<name>/<key>".
    """

    target: Path
    texts: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @property
    def temporary(self) -> Path:
        """Where it is written."""
        return temporary_path(self.target)

    def discard(self) -> None:
        """Remove what was written of it, once no rank writes any more."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def save_checkpoint(
    run_directory: Path,
    cycle: int,
    state: Mapping[str, Any],
    documents: Mapping[str, str],
    ranks: Ranks = SINGLE,
) -> Path:
    """Write all run state and publish it under its name; every rank calls this.

    Args:
        run_directory: of the run, the same directory for all ranks.
        cycle: the last one completed.
        state: "networks" and "optimizers" hold tensors by name and key, whole or DTensors; every
            other entry is plain data for JSON.
        documents: further text files, e.g. the recipe.
        ranks: of the run.

    Returns:
        The checkpoint, published.

    Raises:
        UserError: on every rank, where any cannot write; nothing is published or left behind then.
    """
    peers = Peers(ranks)
    draft = begin(run_directory, cycle, state, documents, peers)
    return publish(draft, write(draft, peers), peers)


def begin(
    run_directory: Path,
    cycle: int,
    state: Mapping[str, Any],
    documents: Mapping[str, str],
    peers: Peers,
    copies: bool = False,
) -> Draft:
    """Make the temporary directory and take hold of the state; `copies`: it may change then."""
    plain = {k: v for k, v in state.items() if k not in SECTIONS}
    names = {section: list(state[section]) for section in SECTIONS}
    text = json.dumps({**plain, "cycle": cycle, "tensors": names}, indent=1)
    draft = Draft(checkpoint_path(run_directory, cycle), {**documents, STATE: text}, {})
    directory = draft.temporary / TENSORS

    def make() -> None:
        remove_leftovers(run_directory)
        directory.mkdir(parents=True)

    def take_hold() -> None:
        if not directory.is_dir():
            raise OSError(f"{directory}, made by rank 0, is not there: all ranks must share a disk")
        draft.tensors = writable(flatten(state), copies)

    with saving(draft.target):
        peers.first(make, draft.discard)
        peers.each(take_hold, draft.discard)
    return draft


def write(draft: Draft, peers: Peers) -> Files:
    """Write and flush every rank's tensors; all files of all ranks."""
    with saving(draft.target):
        directory = draft.temporary / TENSORS
        parts = peers.each(lambda: write_tensors(directory, draft.tensors, peers), draft.discard)
    return {f"{TENSORS}/{name}": entry for part in parts for name, entry in part.items()}


def publish(draft: Draft, files: Files, peers: Peers) -> Path:
    """Write what is left, the manifest last, and give the directory its name."""
    with saving(draft.target):
        peers.first(lambda: _publish(draft, files), draft.discard)
    return draft.target


def _publish(draft: Draft, files: Files) -> None:
    temporary, target = draft.temporary, draft.target
    for name, entry in files.items():
        if (temporary / name).stat().st_size != entry["size"]:
            raise OSError(f"{temporary / name} is not as its rank has written it")
    texts = {
        name: write_file(temporary / name, text.encode()) for name, text in draft.texts.items()
    }
    write_file(temporary / MANIFEST, encode_manifest({**files, **texts}))
    sync_directory(temporary / TENSORS)
    sync_directory(temporary)
    if target.exists():
        remove_checkpoint(target)
    os.rename(temporary, target)
    sync_directory(target.parent)
