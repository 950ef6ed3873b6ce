"""Reading a checkpoint, whole or into the shards of a run, every byte checked first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewstep.checkpoint.manifest import read_state, verify_checkpoint
from fewstep.checkpoint.peers import Peers
from fewstep.checkpoint.tensors import (
    SECTIONS,
    TENSORS,
    ByName,
    SavedTensor,
    flatten,
    nest,
    read_tensors,
    saved_tensors,
)
from fewstep.errors import UserError
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.training.state import check_names

Into = Callable[[Mapping[str, list[str]]], Mapping[str, ByName]]


def load_checkpoint(
    checkpoint: Path, into: Into | None = None, ranks: Ranks = SINGLE, partial: bool = False
) -> dict[str, Any]:
    """The state that `save_checkpoint` was given; every rank calls this.

    Args:
        checkpoint: where it is.
        into: from each optimizer's tensor names to the "networks" and "optimizers" that are read
            in place, of any sharding; by default new tensors in main memory, all of them whole.
        ranks: of the run, or of one group of several.
        partial: whether it may hold more than is read: other networks and optimizers, and in a
            network that is read other tensors. What was left is for `unread` to say. The counters
            are returned whole.

    Raises:
        UserError: on every rank, naming the file that is missing, extra or damaged, or the tensor
            that does not fit.
    """
    peers = Peers(ranks)
    verify_checkpoint(checkpoint, peers)
    state = read_state(checkpoint)
    names = state.pop("tensors")
    saved = saved_tensors(checkpoint / TENSORS)
    by_name = nest(saved, names)
    if into is None:
        flat = {path: torch.empty(s.shape, dtype=s.dtype) for path, s in saved.items()}
        target: Mapping[str, ByName] = nest(flat, names)
    else:
        target = into({name: list(keys) for name, keys in by_name["optimizers"].items()})
    peers.each(lambda: check_fit(by_name, target, partial))
    try:
        peers.each(lambda: read_tensors(saved, flatten(target), peers))
    except OSError as error:
        raise UserError(f"{checkpoint} cannot be read: {error}") from error
    return {**state, **{section: target[section] for section in SECTIONS}}


def load_network(
    checkpoint: Path, name: str, into: Mapping[str, Tensor], partial: bool = False
) -> None:
    """Read one network of a checkpoint in place, in one process.

    Args:
        checkpoint: where it is.
        name: of the network.
        into: its tensors.
        partial: whether it may hold others, of adapters that are not read.

    Raises:
        UserError: naming the file that is missing, extra or damaged, or the tensor that does not
            fit.
    """
    peers = Peers(SINGLE)
    verify_checkpoint(checkpoint, peers)
    names: dict[str, list[str]] = {"networks": [name], "optimizers": []}
    prefix = f"networks/{name}/"
    found = {p: s for p, s in saved_tensors(checkpoint / TENSORS).items() if p.startswith(prefix)}
    target = {"networks": {name: into}, "optimizers": {}}
    check_fit(nest(found, names), target, partial)
    read_tensors(found, flatten(target), peers)


def check_fit(
    saved: Mapping[str, Mapping[str, Mapping[str, SavedTensor]]],
    target: Mapping[str, ByName],
    partial: bool = False,
) -> None:
    """Raise UserError unless names and shapes of what was saved are those of the run.

    With `partial`, networks, optimizers, and tensors of a network may be left over; an optimizer
    is read whole or not at all.
    """
    for section in SECTIONS:
        check_names(section, saved[section], target[section], partial)
        some = partial and section == "networks"
        for name, tensors in target[section].items():
            owner = f"{section.removesuffix('s')} {name}"
            check_names(f"tensors of {owner}", saved[section][name], tensors, some)
            for key, tensor in tensors.items():
                shape = saved[section][name][key].shape
                if shape != tensor.shape:
                    raise UserError(
                        f"the saved tensor {key} of {owner} has shape {tuple(shape)}, the run "
                        f"needs {tuple(tensor.shape)}"
                    )
