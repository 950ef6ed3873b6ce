"""Networks cut into shards, gathered a block at a time: FSDP2 and FSDP1.

Both are ZeRO-3 (Rajbhandari et al., arXiv 1910.02054); FSDP1 is described in arXiv 2304.11277.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fewstep.errors import UserError
from fewstep.parallel.materialize import Filler
from fewstep.parallel.ranks import Ranks, gather_rows
from fewstep.parallel.settings import ParallelSettings
from fewstep.parallel.sharding import Blocks, Sharding
from fewstep.roles.storage import Storage

WRAPPER = "_fsdp_wrapped_module"


def build_mesh(ranks: Ranks, shard_size: int | None) -> DeviceMesh:
    """All ranks in a row, or replicas of groups that share one copy."""
    kind, size = ranks.device.type, shard_size or ranks.size
    if size == ranks.size:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (ranks.size // size, size), mesh_dim_names=("replicate", "shard"))


def check_shardable(network: nn.Module, kind: str) -> None:
    """Raise UserError where a network has what cannot be cut into shards."""
    for key, parameter in network.named_parameters():
        if parameter.ndim == 0:
            raise UserError(
                f"parallel.kind: {kind!r} cannot cut {key!r} into shards, which is a single "
                f"number; give it the shape (1,), or take 'none' or 'ddp'"
            )


def separate_blocks(network: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    """The blocks that share no parameter with the rest; the others are left to the root."""
    found = blocks(network)
    names: dict[int, list[str]] = {}
    for key, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(key)
    shared = [keys for keys in names.values() if len(keys) > 1]
    return {
        path: block
        for path, block in found.items()
        if all(len({key.startswith(f"{path}.") for key in keys}) == 1 for keys in shared)
    }


@final
class FullySharded2(Sharding):
    """FSDP2: every parameter is a DTensor, cut along its first dimension."""

    def __init__(
        self, ranks: Ranks, settings: ParallelSettings, compute_dtype: torch.dtype | None
    ) -> None:
        """`compute_dtype`: what gathered weights are cast to; gradients are reduced in float32."""
        self.ranks = ranks
        self._mesh = build_mesh(ranks, settings.shard_size)
        self.replicas = ranks.size // (settings.shard_size or ranks.size)
        self._each = settings.reduce_each_micro_batch
        self._options: dict[str, Any] = {"mesh": self._mesh, "reshard_after_forward": True}
        if compute_dtype is not None:
            self._options["mp_policy"] = MixedPrecisionPolicy(
                compute_dtype, torch.float32, cast_forward_inputs=False
            )
        if settings.cpu_offload:
            pinned = ranks.device.type == "cuda"
            offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=pinned)
            self._options["offload_policy"] = offload

    def shard(self, storage: Storage, name: str, blocks: Blocks, filler: Filler) -> None:
        """See `Sharding.shard`."""
        network, options = storage.networks[name], dict(self._options)
        if name in storage.heads:
            options.pop("mp_policy", None)
        check_shardable(network, "fsdp2")
        for path, block in separate_blocks(network, blocks).items():
            filler.fill(block, f"{path}.")
            fully_shard(block, **options)
            filler.close(block)
        filler.fill(network)
        # The root too is cut again after its forward pass: a copy that lives on would go stale
        # when another network's update changes it (student_ema, after a validation).
        fully_shard(network, **options)
        storage.bind(name, network.state_dict(keep_vars=True))

    def accumulating(self, storage: Storage, role: str, last: bool) -> AbstractContextManager[None]:
        """See `Sharding.accumulating`."""
        for called in storage.called_for(role):
            network = cast(FSDPModule, storage.networks[storage.network_of(called)])
            network.set_requires_gradient_sync(last or self._each)
        return nullcontext()

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Sharding.local`."""
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


@final
class _Outside(nn.Module):
    """A root without weights.

    FSDP1 leaves the root's own weights gathered after a forward pass without gradients, and would
    use that stale copy after an update; with an empty root there are none.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)


@final
class FullySharded1(Sharding):
    """FSDP1: the parameters of a block in one flat row, each rank a stretch of it.

    With `use_orig_params`, always: adapters and their frozen base lie in one row, and every role
    must find its own tensors in it.
    """

    zeros_for_none = True

    def __init__(
        self, ranks: Ranks, settings: ParallelSettings, compute_dtype: torch.dtype | None
    ) -> None:
        """`compute_dtype`: what gathered weights are cast to; gradients are reduced in float32."""
        self.ranks = ranks
        self._mesh = build_mesh(ranks, settings.shard_size)
        self.replicas = ranks.size // (settings.shard_size or ranks.size)
        self._each = settings.reduce_each_micro_batch
        hybrid = self._mesh.ndim == 2
        self._options: dict[str, Any] = {
            "device_mesh": self._mesh,
            "sharding_strategy": (
                ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
            ),
            "use_orig_params": True,
            "device_id": ranks.device,
        }
        if compute_dtype is not None:
            self._options["mixed_precision"] = MixedPrecision(
                param_dtype=compute_dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            )
        if settings.cpu_offload:
            self._options["cpu_offload"] = CPUOffload(offload_params=True)
        self._roots: dict[str, FSDP1] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._sizes: dict[int, list[int]] = {}

    def shard(self, storage: Storage, name: str, blocks: Blocks, filler: Filler) -> None:
        """See `Sharding.shard`."""
        network, options = storage.networks[name], dict(self._options)
        if name in storage.heads:
            options.pop("mixed_precision", None)
        check_shardable(network, "fsdp1")
        with warnings.catch_warnings():
            # It warns of what is meant here: frozen and trained weights in one row.
            warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp")
            warnings.filterwarnings("ignore", message=".*FSDP.*")
            for path, block in separate_blocks(network, blocks).items():
                filler.fill(block, f"{path}.")
                self._remember_shapes(block)
                wrapped = FSDP1(block, **options)
                network.set_submodule(path, wrapped)
                filler.close(wrapped)
            filler.fill(network)
            self._remember_shapes(network)
            inner = FSDP1(network, **options)
            self._roots[name] = FSDP1(_Outside(inner), **options)
        storage.bind(name, _named_tensors(network))
        self._measure(list(network.parameters()))

    def wrap(self, storage: Storage, roles: Sequence[str], trained: Sequence[str]) -> None:
        """See `Sharding.wrap`."""
        for called in (*roles, *storage.heads):
            storage.wrap(called, self._roots[storage.network_of(called)])

    @contextmanager
    def accumulating(self, storage: Storage, role: str, last: bool) -> Iterator[None]:
        """See `Sharding.accumulating`."""
        with ExitStack() as contexts:
            for called in () if last or self._each else storage.called_for(role):
                contexts.enter_context(self._roots[storage.network_of(called)].no_sync())
            yield

    def aligned(
        self, source: Sequence[Tensor], target: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See `Sharding.aligned`; adapters in one row are cut differently, so they are gathered."""
        pairs = list(zip(source, target, strict=True))
        if all(self._sizes[id(s)] == self._sizes[id(t)] for s, t in pairs):
            return list(source), list(target)
        whole = self._whole([(s, s) for s in source])
        return [self._cut(t, w) for t, w in zip(target, whole, strict=True)], list(target)

    def saved(self, tensor: Tensor, part: Tensor) -> Tensor:
        """See `Sharding.saved`: cut along the first dimension, as FSDP2 cuts it."""
        if id(tensor) not in self._shapes:
            return part
        (whole,) = self._whole([(tensor, part)])
        placements = [Replicate()] * (self._mesh.ndim - 1) + [Shard(0)]
        return distribute_tensor(whole, self._mesh, placements, src_data_rank=None)

    def restored(self, tensor: Tensor, saved: Tensor) -> Tensor:
        """See `Sharding.restored`."""
        if not isinstance(saved, DTensor):
            return saved
        return self._cut(tensor, saved.full_tensor())

    def _remember_shapes(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self._shapes.setdefault(id(parameter), parameter.shape)

    def _measure(self, parameters: Sequence[Tensor]) -> None:
        """Learn how many numbers of each parameter every rank of a copy holds, in their order."""
        counts = torch.tensor([p.numel() for p in parameters], device=self.ranks.device)
        rows = self._gather(counts).T.tolist()
        self._sizes |= {id(p): sizes for p, sizes in zip(parameters, rows, strict=True)}

    def _gather(self, row: Tensor) -> Tensor:
        """Rows of the same length of all ranks that share a copy: [ranks, N]."""
        group = self._mesh.get_group("shard")
        return gather_rows(row, dist.get_world_size(group), group)

    @torch.no_grad()
    def _whole(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Whole tensors from every rank's (parameter, part cut like it), by one collective."""
        sizes = [self._sizes[id(parameter)] for parameter, _ in pieces]
        totals = [sum(column) for column in zip(*sizes, strict=True)]
        first = pieces[0][1]
        row = torch.zeros(max(totals), dtype=first.dtype, device=self.ranks.device)
        flat = torch.cat([part.detach().reshape(-1) for _, part in pieces])
        row[: len(flat)] = flat
        ranks = [
            list(found[:total].split(list(column)))
            for found, total, column in zip(
                self._gather(row), totals, zip(*sizes, strict=True), strict=True
            )
        ]
        return [
            torch.cat(parts).view(self._shapes[id(parameter)]).to(first.device)
            for (parameter, _), parts in zip(pieces, zip(*ranks, strict=True), strict=True)
        ]

    def _cut(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's stretch of a whole tensor."""
        sizes = self._sizes[id(parameter)]
        rank = self._mesh.get_local_rank("shard")
        start = sum(sizes[:rank])
        return whole.reshape(-1)[start : start + sizes[rank]]


def _named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a wrapped network by their names without wrappers."""
    found: dict[str, Tensor] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        start = "".join(f"{part}." for part in path.split(".") if part and part != WRAPPER)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if (
                tensor is not None
                and key != "_flat_param"
                and key not in module._non_persistent_buffers_set
            ):
                found[start + key] = tensor
    return found
