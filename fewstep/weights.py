"""The student's weights on their way to another process: names, portions, and a proof of arrival.

A sender calls its tensors by names that do not depend on the role or on how they are cut, sends
them a portion at a time, and hashes what it sends. The receiver hashes what its network holds
afterwards, so that weights that went anywhere else do not agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fewstep.errors import TrainingError
from fewstep.roles.role import Roles
from fewstep.roles.storage import Storage
from fewstep.training.worker import Worker


@final
@dataclass(frozen=True)
class Confirmation:
    """What somebody holds, to be compared with what somebody else does.

    Attributes:
        version: of the weights, counted by the sender.
        checksum: SHA-256 of all tensors in their order, as hexadecimal digits.
        tensors: how many there are.
    """

    version: int
    checksum: str
    tensors: int


@final
class Checksum:
    """SHA-256 over names, dtypes, shapes and bytes of tensors, in the order they are added."""

    def __init__(self) -> None:
        """Of no tensor yet."""
        self._hash = hashlib.sha256()
        self.count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor of any dtype, on any device; it is brought to the CPU."""
        # What it says fixes how many bytes follow, so no two lists of tensors look alike.
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        self._hash.update(head.encode() + b"\n")
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        self._hash.update(plain.view(torch.uint8).numpy().data)
        self.count += 1

    def hexdigest(self) -> str:
        """The sum so far; more may be added after it."""
        return self._hash.hexdigest()

    def confirmation(self, version: int) -> Confirmation:
        """The sum so far, as that of some version."""
        return Confirmation(version, self.hexdigest(), self.count)


def canonical_names(storage: Storage, role: str) -> dict[str, str]:
    """What makes up a role: name without the role in it -> its own name in the network.

    The adapter's tensors where the role is one; else the network's parameters and persistent
    buffers, without the adapters on it. A parameter that has several names goes by its first. The
    order is the network's, whatever other roles are there and however they are cut.
    """
    own = storage.parameters(role)
    if storage.adapter(role) is not None:
        return {without_adapter(key): key for key in own}
    tensors = storage.tensors[storage.network_of(role)]
    kept = (k for k, t in tensors.items() if k in own or not isinstance(t, nn.Parameter))
    return {key: key for key in kept}


def without_adapter(key: str) -> str:
    """`....to_q.lora_A.student.weight` -> `....to_q.lora_A.weight`; see `storage.adapter_of`."""
    parts = key.split(".")
    kind = max(i for i, part in enumerate(parts) if part.startswith("lora_"))
    return ".".join([*parts[: kind + 1], *parts[kind + 2 :]])


def student_tensors(roles: Roles, role: str) -> dict[str, Tensor]:
    """What has to be sent of a role: canonical name -> tensor, perhaps a part of one.

    Args:
        roles: of the sender or the receiver.
        role: "student", or another that takes its place, such as "student_ema".
    """
    tensors = roles.storage.tensors[roles.storage.network_of(role)]
    return {name: tensors[key] for name, key in canonical_names(roles.storage, role).items()}


def split_into_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Cut names into portions, in their order, each as large as may be.

    Args:
        sizes: bytes of each tensor, whole.
        limit: bytes of a portion; a tensor that is larger makes one by itself.
    """
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets


def whole(tensor: Tensor) -> Tensor:
    """A detached, contiguous copy on the CPU; of a DTensor, put together by all of its ranks."""
    found = tensor.detach()
    if isinstance(found, DTensor):
        found = found.full_tensor()
    return found.to("cpu", copy=True).contiguous()


def whole_sizes(worker: Worker, role: str) -> dict[str, int]:
    """Bytes of each tensor that has to be sent of a role, by canonical name: the same on all ranks.

    To be called by all ranks alike: a rank knows only the length of its own stretch of a flat row.
    """
    tensors, sharding = student_tensors(worker.roles, role), worker.sharding
    here = [tensor.numel() for tensor in tensors.values()]
    added = worker.ranks.sum(torch.tensor(here, dtype=torch.float64)) / sharding.replicas
    return {
        # A DTensor's own number is that of the whole; buffers are whole everywhere.
        name: tensor.element_size()
        * (int(n) if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor) else m)
        for (name, tensor), n, m in zip(tensors.items(), added.tolist(), here, strict=True)
    }


def gather_bucket(worker: Worker, role: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Some of a role's tensors, whole, as copies on the CPU of every rank.

    To be called by all ranks alike, and not during a phase.

    Args:
        worker: holds the role.
        role: whose tensors.
        names: canonical ones.

    Raises:
        KeyError: for a name that is not the role's.
    """
    tensors, sharding = student_tensors(worker.roles, role), worker.sharding
    return {name: whole(sharding.saved(tensors[name], tensors[name].detach())) for name in names}


@torch.no_grad()
def bind(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy weights into tensors of the same names; nothing is cast, and nothing changes on error.

    Raises:
        TrainingError: naming what is unknown, or of another shape or dtype.
    """
    for name, value in weights.items():
        target = tensors.get(name)
        if target is None:
            raise TrainingError(f"weights for rollout: {name!r} is no tensor of this student")
        for what in ("shape", "dtype"):
            given, wanted = getattr(value, what), getattr(target, what)
            if given != wanted:
                raise TrainingError(
                    f"weights for rollout: {name!r} has {what} {given}, this student's has {wanted}"
                )
    for name, value in weights.items():
        tensors[name].copy_(value)


def confirm(network: nn.Module, names: Mapping[str, str], version: int) -> Confirmation:
    """What a whole network holds now under some names; those that it lacks are not counted.

    Args:
        network: the one that is called.
        names: canonical name -> name in the network.
        version: of what it ought to hold.
    """
    checksum, held = Checksum(), network.state_dict(keep_vars=True)
    for name, key in names.items():
        if key in held:
            checksum.add(name, held[key])
    return checksum.confirmation(version)
