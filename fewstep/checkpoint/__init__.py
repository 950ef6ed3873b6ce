"""All run state, once, atomically.

A checkpoint is a directory `checkpoints/cycle_000100` that appears whole or not at all: it is
written under a temporary name, flushed to disk, and renamed. Its manifest, written last, lists
every file with size and SHA-256; a directory without a complete manifest does not exist for
resume. Tensors are safetensors, each rank's shards in files of its own, the rest is JSON: nothing
is unpickled. Who has written it, one process, the ranks of a run, or several groups of ranks, does
not matter to who reads it.
"""

from fewstep.checkpoint.directory import (
    MANIFEST,
    Best,
    best_checkpoint,
    checkpoint_cycle,
    checkpoint_path,
    checkpoints_directory,
    complete_checkpoints,
    is_checkpoint_name,
    is_complete,
    latest_checkpoint,
    prune_checkpoints,
    read_best,
    remove_checkpoint,
    remove_leftovers,
    write_best,
)
from fewstep.checkpoint.draft import (
    discard_draft,
    hold_part,
    open_draft,
    publish_draft,
    write_held,
    write_part,
)
from fewstep.checkpoint.load import load_checkpoint, load_network
from fewstep.checkpoint.manifest import (
    read_manifest,
    read_state,
    verify_checkpoint,
    verify_state,
)
from fewstep.checkpoint.parts import (
    check_all_read,
    divide,
    merge_states,
    plain_state,
    tensor_paths,
    unread,
)
from fewstep.checkpoint.save import save_checkpoint
from fewstep.checkpoint.saver import Background, CheckpointSettings, Saver
from fewstep.checkpoint.tensors import TENSORS, saved_tensors

__all__ = [
    "MANIFEST",
    "TENSORS",
    "Background",
    "Best",
    "CheckpointSettings",
    "Saver",
    "best_checkpoint",
    "check_all_read",
    "checkpoint_cycle",
    "checkpoint_path",
    "checkpoints_directory",
    "complete_checkpoints",
    "discard_draft",
    "divide",
    "hold_part",
    "is_checkpoint_name",
    "is_complete",
    "latest_checkpoint",
    "load_checkpoint",
    "load_network",
    "merge_states",
    "open_draft",
    "plain_state",
    "prune_checkpoints",
    "publish_draft",
    "read_best",
    "read_manifest",
    "read_state",
    "remove_checkpoint",
    "remove_leftovers",
    "save_checkpoint",
    "saved_tensors",
    "tensor_paths",
    "unread",
    "verify_checkpoint",
    "verify_state",
    "write_best",
    "write_held",
    "write_part",
]
