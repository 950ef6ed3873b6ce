"""Moving what a rank holds between its device and main memory, while another group needs it.

Memory changes hands below the tensors: what moves is what a storage points to, and storages stay
who they are. So views, DTensors, FSDP1's flat rows and an optimizer's references stay valid, and
nothing needs to know who refers to what. It is done with torch's `_swap_data_ptr_`, which, other
than `resize_`, also works where a storage does not own its memory (safetensors, numpy, memory
maps), and lets what has no memory refuse to be used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from fewstep.errors import TrainingError
from fewstep.parallel.sharding import Sharding
from fewstep.roles.role import Roles

CHUNK_BYTES = 1 << 26
ASLEEP = "this tensor's memory has been given away (placement.offload): wake its group first"


@final
@dataclass(frozen=True)
class Moved:
    """What a move has done.

    Attributes:
        bytes: moved; 0 where everything was there already.
        seconds: it took.
    """

    bytes: int
    seconds: float


@final
class Offload:
    """Moves what a rank holds between its device and main memory, in place.

    A storage is moved whole, once, however many tensors look at it and however little of it they
    see. Storages that are elsewhere (in main memory, under parallel.cpu_offload) are left alone,
    so are tensors on the meta device. A storage that did not own its memory (a memory map, numpy's,
    shared with another process) owns it after the first `wake`, and is cut off from the former.

    The tensors are asked for anew by every `sleep`: an optimizer's moments appear with its first
    step. Main memory is kept from one `sleep` to the next, in page-locked chunks for a CUDA device:
    locking pages takes longer than the copy. So a rank needs as much main memory as its device
    holds, all the time.

    While asleep, what would write to a tensor raises, and so does most of what would read it; on a
    CUDA device all of it does. On the CPU, elementwise reads end the process; `require_awake` is
    for those who are about to use the tensors.
    """

    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Prepare to move.

        Args:
            device: whose memory is wanted; the CPU's too can be moved, to other memory of it.
            tensors: all that is to be moved, of any shapes and dtypes; plain ones, no DTensors.
        """
        self._device = device
        self._tensors = tensors
        self._main_memory = _MainMemory(pinned=device.type == "cuda")
        self._moved: list[tuple[torch.UntypedStorage, int]] = []
        self._asleep = False

    @property
    def asleep(self) -> bool:
        """Whether the tensors are in main memory."""
        return self._asleep

    @property
    def resident_bytes(self) -> int:
        """Bytes that are on the device now."""
        return sum(storage.nbytes() for storage in self._resident())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are in main memory now, to come back."""
        return sum(nbytes for _, nbytes in self._moved)

    def require_awake(self, purpose: str) -> None:
        """Raise TrainingError where the tensors are in main memory.

        Args:
            purpose: what they are needed for.
        """
        if self._asleep:
            raise TrainingError(
                f"{purpose} needs the weights, but they are in main memory (placement.offload): "
                f"wake the group first"
            )

    @torch.no_grad()
    def sleep(self) -> Moved:
        """Move everything to main memory and free the device's; nothing to do while asleep.

        Nothing has changed if it raises for want of main memory.
        """
        if self._asleep:
            return Moved(0, 0.0)
        start = time.perf_counter()
        held = [(storage, storage.nbytes()) for storage in self._resident()]
        self._synchronize()  # other streams may still write to them
        self._main_memory.reserve(sum(nbytes for _, nbytes in held))
        for (storage, _), parts in zip(held, self._main_memory.parts(held), strict=True):
            source = as_bytes(storage)
            for here, there in parts:
                there.copy_(source[here], non_blocking=True)
        self._synchronize()
        for storage, _ in held:
            _give_away(storage)
        if self._device.type == "cuda":
            # Else torch would keep the memory for this process.
            torch.cuda.empty_cache()
        self._moved, self._asleep = held, True
        return Moved(self.offloaded_bytes, time.perf_counter() - start)

    @torch.no_grad()
    def wake(self) -> Moved:
        """Move everything back to the device; nothing to do while awake.

        Still asleep, and nothing lost, if it raises for want of memory on the device.
        """
        if not self._asleep:
            return Moved(0, 0.0)
        start = time.perf_counter()
        filled = []
        for (storage, nbytes), parts in zip(
            self._moved, self._main_memory.parts(self._moved), strict=True
        ):
            target = torch.empty(nbytes, dtype=torch.uint8, device=storage.device)
            for here, there in parts:
                target[here].copy_(there, non_blocking=True)
            filled.append(target.untyped_storage())
        self._synchronize()
        for (storage, _), full in zip(self._moved, filled, strict=True):
            storage._swap_data_ptr_(full)  # type: ignore[attr-defined]
        nbytes = self.offloaded_bytes
        self._moved, self._asleep = [], False
        return Moved(nbytes, time.perf_counter() - start)

    def _resident(self) -> list[torch.UntypedStorage]:
        """Every storage once that has memory on the device."""
        found = (tensor.untyped_storage() for tensor in self._tensors())
        return list({s._cdata: s for s in found if s.nbytes() and self._is_here(s)}.values())

    def _is_here(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == self._device.type

    def _synchronize(self) -> None:
        """Wait for all work of the device, whatever stream it is on."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@final
class _MainMemory:
    """One long row of bytes in main memory.

    In chunks, all of one size: torch rounds every page-locked piece up to a power of two, which
    would nearly double a large one.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._chunks: list[Tensor] = []

    def reserve(self, nbytes: int) -> None:
        """Be so long, at least; what is no longer needed is let go."""
        count = -(-nbytes // CHUNK_BYTES)
        del self._chunks[count:]
        while len(self._chunks) < count:
            self._chunks.append(
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
            )

    def parts(
        self, held: Iterable[tuple[torch.UntypedStorage, int]]
    ) -> Iterator[list[tuple[slice, Tensor]]]:
        """For each storage, of so many bytes: stretches of it, and each one's place in the row."""
        start = 0
        for _, nbytes in held:
            found, done = [], 0
            while done < nbytes:
                chunk, offset = divmod(start + done, CHUNK_BYTES)
                size = min(nbytes - done, CHUNK_BYTES - offset)
                place = self._chunks[chunk][offset : offset + size]
                found.append((slice(done, done + size), place))
                done += size
            start += nbytes
            yield found


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, whatever looks at it: uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_away(storage: torch.UntypedStorage) -> None:
    """Free a storage's memory, and let it refuse to be used until another is swapped in."""
    nothing = torch.empty(0, device=storage.device)
    torch._C._set_throw_on_mutable_data_ptr(nothing)
    # The refusal is part of what is swapped; the memory dies with the tensor that gets it.
    storage._swap_data_ptr_(nothing.untyped_storage())  # type: ignore[attr-defined]
    if storage.device.type == "cuda":
        # For those who read, too; torch has it for CUDA only.
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, ASLEEP)


@torch.no_grad()
def held_tensors(roles: Roles, sharding: Sharding) -> list[Tensor]:
    """What a rank holds of the roles: its own parts, as plain tensors.

    Parameters and buffers (the frozen base's, and those that are not saved) of every network,
    FSDP1's flat rows, gradients where there are any, and the optimizers' states. Averaged weights
    are parameters of a network. Several may share a storage.

    FSDP1 keeps a row of gradients, as long as that of the weights (the frozen base's included),
    after the last parameter has let go of its own, and drops it when the next pass begins. Such
    rows are dropped here already.

    Not among them: DDP's buckets for gradients (as large as the trained weights, and kept by torch
    for good), the data of a run, and memory for activations, which is free between phases.
    """
    storage = roles.storage
    # FSDP1 keeps the weights outside of blocks in a wrapper around the network.
    tops = [*storage.networks.values(), *map(storage.module, (*roles, *storage.heads))]
    modules = {id(m): m for top in tops for m in top.modules()}.values()
    found = [t for m in modules for t in _own_tensors(m)]
    gradients = [t.grad for t in found if t.is_leaf and t.grad is not None]
    states = [
        value
        for role in roles.values()
        if role.optimizer is not None
        for state in role.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sharding.local([*found, *gradients, *states])


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a module without those below it."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
    if isinstance(module, FSDP1) and module._handle is not None:
        module._handle._reset_flat_param_grad_info_if_needed()  # type: ignore[no-untyped-call]
        yield module._handle.flat_param
