"""Writing a checkpoint: begun by all ranks of a run, written by each, published by the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from fewstep.checkpoint.directory import checkpoint_path, temporary_path
from fewstep.checkpoint.draft import (
    WHOLE,
    Documents,
    Files,
    discard_draft,
    finish_draft,
    make_draft,
    take_hold,
    write_files,
)
from fewstep.checkpoint.manifest import STATE, encode_state
from fewstep.checkpoint.parts import plain_state
from fewstep.checkpoint.peers import Peers
from fewstep.checkpoint.tensors import flatten
from fewstep.files import saving
from fewstep.parallel.ranks import SINGLE, Ranks


@final
@dataclass
class Draft:
    """A checkpoint in the making, under a temporary name.

    Attributes:
        target: the name that it will have.
        documents: its other files.
        tensors: by "<section>/<name>/<key>".
    """

    target: Path
    documents: Documents
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def temporary(self) -> Path:
        """Where it is written."""
        return temporary_path(self.target)

    def discard(self) -> None:
        """Remove what was written of it, once no rank writes any more."""
        discard_draft(self.temporary)


def save_checkpoint(
    run_directory: Path,
    cycle: int,
    state: Mapping[str, Any],
    documents: Documents,
    ranks: Ranks = SINGLE,
) -> Path:
    """Write all run state and publish it under its name; every rank calls this.

    Args:
        run_directory: of the run, the same directory for all ranks.
        cycle: the last one completed.
        state: "networks" and "optimizers" hold tensors by name and key, whole or DTensors; every
            other entry is plain data for JSON.
        documents: further files by name, e.g. the recipe.
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
    documents: Documents,
    peers: Peers,
    copies: bool = False,
) -> Draft:
    """Make the temporary directory and take hold of the state; `copies`: it may change then."""
    described = {**documents, STATE: encode_state(plain_state(state), cycle)}
    draft = Draft(checkpoint_path(run_directory, cycle), described)
    with saving(draft.target):
        peers.first(lambda: make_draft(run_directory, draft.temporary), draft.discard)
        draft.tensors = take_hold(
            draft.temporary, WHOLE, flatten(state), peers, draft.discard, copies
        )
    return draft


def write(draft: Draft, peers: Peers) -> Files:
    """Write and flush every rank's tensors; all files of all ranks."""
    with saving(draft.target):
        return write_files(draft.temporary, WHOLE, draft.tensors, peers, draft.discard)


def publish(draft: Draft, files: Files, peers: Peers) -> Path:
    """Write what is left, the manifest last, and give the directory its name."""
    with saving(draft.target):
        peers.first(lambda: finish_draft(draft.temporary, files, draft.documents), draft.discard)
    return draft.target
