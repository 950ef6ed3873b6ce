"""The ranks of a run, and the few collectives that are not torch's own sharding."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from fewstep.errors import UserError
from fewstep.parallel.failures import any_has_failed, end_with_launcher

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Ranks:
    """The processes that share a run. One process alone has no group and talks to nobody.

    Attributes:
        rank: of this process.
        size: how many there are.
        device: of this process.
        grouped: whether there is a process group (one process may have one too).
    """

    rank: int
    size: int
    device: torch.device
    grouped: bool

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks to the user."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's part of `count` things: contiguous, and as even as can be."""
        return share(count, self.size, self.rank)

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over ranks, float64 [N]: added in the order of the ranks, the same bits on all."""
        return numbers if self.size == 1 else self.gather(numbers).sum(0)

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor of the same shape [...], on every rank: [size, ...]."""
        if self.size == 1:
            return tensor[None]
        return gather_rows(tensor.to(self.device), self.size).to(tensor.device)

    def gather_shares(self, part: Tensor, count: int) -> Tensor:
        """What every rank has made of its `share` of `count` rows, in order: [count, ...]."""
        if self.size == 1:
            return part
        most = -(-count // self.size)
        padded = part.new_zeros((most, *part.shape[1:]))
        padded[: len(part)] = part
        rows = self.gather(padded)
        return torch.cat([rows[r, : len(share(count, self.size, r))] for r in range(self.size)])

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place, on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def tell(self, find: Callable[[], T]) -> T:
        """What rank 0, and no other, finds (anything small), on every rank."""
        if self.size == 1:
            return find()
        box = [find() if self.first else None]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return cast(T, box[0])

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.sum(torch.tensor([float(flag)], dtype=torch.float64))[0] > 0)

    def barrier(self) -> None:
        """Wait for all."""
        self.any(False)


def gather_rows(tensor: Tensor, size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensor [...] of each of `size` ranks of a group, on every one of them: [size, ...]."""
    found = tensor.new_empty((size, *tensor.shape))
    dist.all_gather(list(found.unbind()), tensor.contiguous(), group=group)
    return found


CPU = torch.device("cpu")
SINGLE = Ranks(0, 1, CPU, grouped=False)


def why_unusable(device: str) -> str | None:
    """Why tensors cannot be put on a device; None where they can."""
    try:
        torch.empty(1, device=device).cpu()  # not from meta, which holds nothing
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def share(count: int, size: int, rank: int) -> range:
    """The part of `count` things that is one rank's: contiguous, sizes differing by one at most."""
    return range(count * rank // size, count * (rank + 1) // size)


def split_evenly(rows: range, parts: int) -> list[range]:
    """Cut rows into so many contiguous parts, sizes differing by one at most."""
    return [
        range(rows.start + p.start, rows.start + p.stop)
        for p in (share(len(rows), parts, i) for i in range(parts))
    ]


def launched_ranks() -> int | None:
    """How many processes torchrun has started, or None where it has not started this one."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def local_device(device: torch.device) -> torch.device:
    """The device of this process: `cuda` means one for each process of a machine.

    Raises:
        UserError: where several processes would share one device.
    """
    if device.type != "cuda" or launched_ranks() in (None, 1):
        return device
    if device.index is not None:
        raise UserError(
            f"runtime.device: {str(device)!r} names one device, but there are {launched_ranks()} "
            f"processes; write 'cuda', and each takes its own"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def join(device: torch.device, timeout_seconds: int, needed: bool = False) -> Ranks:
    """Meet the other processes that torchrun has started; a process alone is a run of one rank.

    Args:
        device: as the recipe says.
        timeout_seconds: of every collective.
        needed: whether even a process alone needs a process group.
    """
    if launched_ranks() is not None:
        end_with_launcher()
    device = local_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized() and (launched_ranks() is not None or needed):
        backend = backend_for(device)
        timeout = timedelta(seconds=timeout_seconds)
        if launched_ranks() is None:
            store = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(backend, timeout=timeout)
        atexit.register(dissolve)
    if not dist.is_initialized():
        return Ranks(0, 1, device, grouped=False)
    return Ranks(dist.get_rank(), dist.get_world_size(), device, grouped=True)


@final
class MeetingPlace:
    """Where processes that know nothing of each other meet: a store on a port that is free."""

    def __init__(self, address: str) -> None:
        """Open it while this object lives; `address`: of this machine, as others see it."""
        self.address = address
        # The system chooses the port, and it is held from then on: nobody else can take it.
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port


def meet(
    address: str, port: int, rank: int, size: int, device: torch.device, timeout_seconds: int
) -> Ranks:
    """Meet the other processes of a group at a `MeetingPlace`.

    Args:
        address: of the place.
        port: of the place.
        rank: of this process.
        size: how many meet.
        device: of this process; `cuda` means the one that it sees.
        timeout_seconds: of every collective.
    """
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(
        backend_for(device), store=store, rank=rank, world_size=size, timeout=timeout
    )
    return Ranks(rank, size, device, grouped=True)


def backend_for(device: torch.device) -> str:
    """What processes talk through: gloo, and NCCL for what lies on GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def leave() -> None:
    """Take leave of the other processes, once all have got here: at the end of a whole run.

    The launcher ends them all as soon as it sees one go that was only told to stop.
    """
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # one that was lost now is no loss
            gather_rows(torch.zeros(1), dist.get_world_size())
        dissolve()


def dissolve() -> None:
    """End the process group, unless a rank has failed: it might be waited for."""
    if dist.is_initialized() and not any_has_failed():
        dist.destroy_process_group()
