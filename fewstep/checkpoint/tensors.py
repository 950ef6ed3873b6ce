"""The tensors of a checkpoint: torch.distributed.checkpoint over safetensors.

Every rank writes its own shards, and what all ranks hold alike is written once. They can be read
by any other number of ranks, cut in any other way, or by one process. Nothing is ever unpickled.

Where several groups of processes write a checkpoint, each has a folder of its own in `tensors/`.
A tensor lies whole in one folder; which one does not matter to a reader.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from fewstep.checkpoint.manifest import go_back
from fewstep.checkpoint.peers import Peers
from fewstep.errors import UserError
from fewstep.files import FileEntry, describe_file, sync_file

TENSORS = "tensors"
SECTIONS = ("networks", "optimizers")
# A file is put together in memory before it is written, and no other thread runs meanwhile.
FILE_BYTES = 2**28

ByName = Mapping[str, Mapping[str, Tensor]]


class SavedTensor(NamedTuple):
    """What the files say of one tensor, and the folder where they lie."""

    shape: torch.Size
    dtype: torch.dtype
    folder: Path


def flatten(state: Mapping[str, ByName]) -> dict[str, Tensor]:
    """All tensors of a state by "<section>/<name>/<key>"."""
    return {
        f"{section}/{name}/{key}": tensor
        for section in SECTIONS
        for name, tensors in state[section].items()
        for key, tensor in tensors.items()
    }


def nest(flat: Mapping[str, Any], names: Mapping[str, list[str]]) -> dict[str, dict[str, Any]]:
    """The opposite of `flatten`; `names`: those of each section, also of what has no tensors."""
    found: dict[str, dict[str, Any]] = {s: {n: {} for n in names[s]} for s in SECTIONS}
    for path, value in flat.items():
        section, name, key = path.split("/", 2)
        found[section].setdefault(name, {})[key] = value
    return found


def writable(tensors: Mapping[str, Tensor], copies: bool = False) -> dict[str, Tensor]:
    """The same tensors as safetensors can hold them: contiguous, no two on the same memory.

    Args:
        tensors: whole, or cut into shards (DTensors stay so).
        copies: copy them all to main memory, so that training may go on changing them.
    """
    seen: set[int] = set()
    found = {}
    for key, tensor in tensors.items():
        value = tensor.detach()
        if copies:
            value = value.to("cpu", copy=True)
        value = value.contiguous()
        memory = _own_part(value).untyped_storage().data_ptr()
        found[key] = value.clone() if memory in seen else value
        seen.add(memory)
    return found


def _own_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def file_numbers(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Which of a rank's files each tensor goes into: one or more for each network or optimizer."""
    numbers: dict[str, int] = {}
    number, size, previous = 0, 0, ""
    for path, tensor in tensors.items():
        owner = "/".join(path.split("/", 2)[:2])
        added = tensor.numel() * tensor.element_size() // ranks
        size += added
        if owner != previous or size > FILE_BYTES:
            number, size, previous = number + 1, added, owner
        numbers[path] = number
    return numbers


def write_tensors(
    directory: Path, tensors: Mapping[str, Tensor], peers: Peers
) -> dict[str, FileEntry]:
    """Write this rank's part; the files that it has written, by name.

    Must be called inside `Peers.each`, by all ranks with the same names.

    Args:
        directory: exists.
        tensors: `writable` ones, by "<section>/<name>/<key>".
        peers: all ranks.
    """
    if tensors:
        numbers = file_numbers(tensors, peers.ranks.size)
        writer = HuggingFaceStorageWriter(str(directory), numbers, save_distributed=True)
        # It flushes a file to the disk before all of it has left Python's buffer: done below.
        writer.sync_files = False
        _expect_one_process()
        peers.through_torch(
            lambda: save(
                dict(tensors),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=peers.group,
                no_dist=peers.ranks.size == 1,
            )
        )
    files = sorted(directory.glob(f"shard-{peers.ranks.rank + 1:05d}-*.safetensors"))
    for file in files:
        sync_file(file)
    return {file.name: describe_file(file) for file in files}


def saved_tensors(directory: Path) -> dict[str, SavedTensor]:
    """What is in the files, by "<section>/<name>/<key>", in alphabetical order.

    Args:
        directory: the `tensors` of a checkpoint; its folders are those of the groups.

    Raises:
        UserError: where the same tensor is in two folders.
    """
    found: dict[str, SavedTensor] = {}
    for folder in [directory, *sorted(p for p in directory.iterdir() if p.is_dir())]:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        # The order of a directory's entries may differ from machine to machine.
        for path, entry in sorted(metadata.items()):
            assert isinstance(entry, TensorStorageMetadata)
            if path in found:
                raise UserError(
                    f"{directory.parent} is damaged: {path} is in {found[path].folder} and in "
                    f"{folder}{go_back(folder)}"
                )
            found[path] = SavedTensor(entry.size, entry.properties.dtype, folder)
    return {path: found[path] for path in sorted(found)}


def read_tensors(
    saved: Mapping[str, SavedTensor], into: Mapping[str, Tensor], peers: Peers
) -> None:
    """Read in place, each rank its own part. Must be called inside `Peers.each`, by all ranks.

    Args:
        saved: what `saved_tensors` has found.
        into: some of them, whole or DTensors; the same names on every rank.
        peers: all ranks.
    """
    for folder in sorted({saved[path].folder for path in into}):
        _read_folder(folder, {p: t for p, t in into.items() if saved[p].folder == folder}, peers)


def _read_folder(folder: Path, into: dict[str, Tensor], peers: Peers) -> None:
    _expect_one_process()
    peers.through_torch(
        lambda: load(
            into,
            storage_reader=HuggingFaceStorageReader(str(folder)),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=peers.group,
            no_dist=peers.ranks.size == 1,
        )
    )


def _expect_one_process() -> None:
    # Torch warns where there is one process only. Not `catch_warnings`: that would swap the
    # filters of the whole process, in a thread beside training.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
