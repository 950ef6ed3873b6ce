"""Spreading the networks of a run over its ranks, applied from outside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.parallel.compute import compute_in, recompute_in_backward
from fewstep.parallel.materialize import Filler, Weights
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.parallel.settings import ParallelSettings
from fewstep.roles.storage import Storage

Blocks = Callable[[nn.Module], Mapping[str, nn.Module]]


class Sharding(ABC):
    """How the networks are spread, and what the engine must know of it.

    Every kind leaves, after the last backward pass of a phase, the mean over ranks of what each
    rank's backward passes gave.

    Attributes:
        ranks: all of them.
        replicas: how many ranks hold the same part of a tensor.
        zeros_for_none: whether a tensor that got no gradient may show one that is zero.
    """

    ranks: Ranks
    replicas: int
    zeros_for_none: bool = False

    @abstractmethod
    def shard(self, storage: Storage, name: str, blocks: Blocks, filler: Filler) -> None:
        """Fill one network with its values and spread it, a block at a time."""

    def wrap(self, storage: Storage, roles: Sequence[str], trained: Sequence[str]) -> None:
        """Once all networks are spread: say through what each role is called."""
        return

    def accumulating(self, storage: Storage, role: str, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch of a role; gradients need not be reduced before the last."""
        return nullcontext()

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """After the last backward pass: average what has not been averaged yet."""
        return

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's own part of each tensor."""
        return list(tensors)

    def aligned(
        self, source: Sequence[Tensor], target: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors of the same shapes as their local parts, both cut as the target is."""
        return self.local(source), self.local(target)

    def saved(self, tensor: Tensor, part: Tensor) -> Tensor:
        """A part, cut as `tensor` is, as torch.distributed.checkpoint can save it."""
        return part

    def restored(self, tensor: Tensor, saved: Tensor) -> Tensor:
        """This rank's part, cut as `tensor` is, of what was loaded."""
        return saved


@final
class Replicated(Sharding):
    """Everything whole on every rank; gradients are averaged once a phase."""

    def __init__(self, ranks: Ranks = SINGLE) -> None:
        """`ranks`: all of them; by default this process alone."""
        self.ranks = ranks
        self.replicas = ranks.size

    def shard(self, storage: Storage, name: str, blocks: Blocks, filler: Filler) -> None:
        """See `Sharding.shard`."""
        network = storage.networks[name]
        filler.fill(network)
        storage.bind(name, network.state_dict(keep_vars=True))

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """One all-reduce for all gradients of one dtype, which are of one role."""
        if self.ranks.size == 1 or not gradients:
            return
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= self.ranks.size
        parts = torch.split(flat, [g.numel() for g in gradients])
        torch._foreach_copy_(
            list(gradients), [p.view_as(g) for p, g in zip(parts, gradients, strict=True)]
        )


@final
class DistributedData(Sharding):
    """Torch's DistributedDataParallel, once for each trained role and for its tensors alone."""

    def __init__(self, ranks: Ranks) -> None:
        """`ranks`: all of them."""
        self.ranks = ranks
        self.replicas = ranks.size
        self._wrapped: dict[str, nn.parallel.DistributedDataParallel] = {}

    def shard(self, storage: Storage, name: str, blocks: Blocks, filler: Filler) -> None:
        """See `Sharding.shard`."""
        Replicated(self.ranks).shard(storage, name, blocks, filler)

    def wrap(self, storage: Storage, roles: Sequence[str], trained: Sequence[str]) -> None:
        """See `Sharding.wrap`."""
        for role in trained:
            own = {id(parameter) for parameter in storage.parameters(role).values()}
            for called in storage.called_for(role):
                self._wrap(storage, called, own)

    def _wrap(self, storage: Storage, called: str, own: Container[int]) -> None:
        network = storage.networks[storage.network_of(called)]
        # On a shared base, the other roles' adapters and the base are none of its business;
        # buffers are the same everywhere.
        others = [key for key, p in network.named_parameters() if id(p) not in own]
        others += [key for key, _ in network.named_buffers()]
        ignore = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(network, others)  # type: ignore[no-untyped-call]
        self._wrapped[called] = nn.parallel.DistributedDataParallel(network)
        storage.wrap(called, self._wrapped[called], only_in_training=True)

    @contextmanager
    def accumulating(self, storage: Storage, role: str, last: bool) -> Iterator[None]:
        """See `Sharding.accumulating`."""
        with ExitStack() as contexts:
            for called in () if last else storage.called_for(role):
                contexts.enter_context(self._wrapped[called].no_sync())
            yield


def check_shard_size(settings: ParallelSettings, ranks: int) -> None:
    """Raise UserError where so many ranks cannot be divided into groups that share a copy."""
    if ranks % (settings.shard_size or 1) != 0:
        raise UserError(
            f"parallel.shard_size: {settings.shard_size} does not divide the {ranks} ranks of this "
            f"run"
        )


def build_sharding(
    settings: ParallelSettings, ranks: Ranks, compute_dtype: torch.dtype | None
) -> Sharding:
    """The kind of sharding that a recipe asks for.

    Raises:
        UserError: where the ranks cannot be divided so.
    """
    from fewstep.parallel.fully_sharded import FullySharded1, FullySharded2

    if settings.kind == "none":
        return Replicated(ranks)
    if settings.kind == "ddp":
        return DistributedData(ranks)
    check_shard_size(settings, ranks.size)
    if settings.kind == "fsdp1" and settings.cpu_offload and ranks.device.type == "cpu":
        raise UserError(
            "parallel.cpu_offload: fsdp1 offloads from an accelerator, but runtime.device is "
            "'cpu': everything is in host memory already"
        )
    kind = FullySharded1 if settings.kind == "fsdp1" else FullySharded2
    return kind(ranks, settings, compute_dtype)


def spread(
    storage: Storage,
    sharding: Sharding,
    blocks: Blocks,
    weights: Weights | None,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> None:
    """Give every network its weights and spread it over the ranks.

    Args:
        storage: networks whose tensors may be on the meta device.
        sharding: how to spread them.
        blocks: the parts of a network, by name, that are gathered and recomputed as one.
        weights: values of what is on the meta device, by its name in the plain network; None
            where a checkpoint follows.
        dtype: of the weights.
        compute_dtype: of matrix products, where it is another; not of heads, whose small
            differences count (approximate R1).
        recompute: keep only the blocks' inputs for the backward pass.
    """
    for name, network in storage.networks.items():
        parts = blocks if name not in storage.heads else _no_blocks
        if recompute:
            recompute_in_backward(dict.fromkeys(parts(network).values()))
        if compute_dtype is not None and name not in storage.heads:
            compute_in(network, compute_dtype, sharding.ranks.device.type)
        filler = Filler(sharding.ranks, dtype, weights, storage.source_key)
        sharding.shard(storage, name, parts, filler)


def _no_blocks(network: nn.Module) -> Mapping[str, nn.Module]:
    """A head is small: gathered whole."""
    return {}
