"""From a network without memory for its weights to one with them, a part at a time.

Networks are built on the meta device. Rank 0 reads what belongs to one block and every rank gets
it; the block is sharded, which frees all but the rank's own part, before the next one is read. So
no rank holds more than its shards and one block.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.parallel.ranks import Ranks

Weights = Mapping[str, Tensor]


@final
class Filler:
    """Gives the tensors of one network their values, once each."""

    def __init__(
        self,
        ranks: Ranks,
        dtype: torch.dtype,
        weights: Weights | None,
        source_key: Callable[[str], str],
    ) -> None:
        """Prepare to fill.

        Args:
            ranks: all of them.
            dtype: of floating-point tensors.
            weights: values by key, read on rank 0 only; None leaves what has no value yet
                uninitialised, for a checkpoint to fill.
            source_key: from a tensor's name in the network to its key in `weights`.
        """
        self._ranks = ranks
        self._dtype = dtype
        self._weights = weights
        self._source_key = source_key
        self._done: set[int] = set()
        # Weakly: what has been cut into shards must not be kept whole here.
        self._new: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._old: list[Tensor] = []  # keeps what `_new` knows by its identity alive

    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """Give every tensor of a module, that has not got one yet, memory and a value.

        Args:
            module: of the network, or all of it.
            prefix: its name in the network, with a dot at the end.
        """
        for owner, key, tensor in list(_tensors(module, prefix, self._done)):
            new = self._new.get(id(tensor))
            if new is None:
                new = self._remember(tensor, self._value(key, tensor))
            name = key.rpartition(".")[2]
            place = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
            place[name] = new  # type: ignore[assignment]

    def close(self, module: nn.Module) -> None:
        """Leave alone what is below a module from now on: it is sharded."""
        self._done |= {id(m) for m in module.modules()}

    def _remember(self, old: Tensor, value: Tensor) -> Tensor:
        new = value
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(value, requires_grad=old.requires_grad)
        self._new[id(old)] = new
        self._old.append(old)
        return new

    @torch.no_grad()
    def _value(self, key: str, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        device = self._ranks.device
        if tensor.is_meta and self._weights is None:
            return torch.empty(tensor.shape, dtype=dtype, device=device)
        if not self._ranks.first:
            value = torch.empty(tensor.shape, dtype=dtype, device=device)
        else:
            source = self._read(key, tensor.shape) if tensor.is_meta else tensor
            value = source.detach().to(device, dtype, copy=True)
        return self._ranks.broadcast(value)

    def _read(self, key: str, shape: torch.Size) -> Tensor:
        assert self._weights is not None
        name = self._source_key(key)
        if name not in self._weights:
            raise UserError(f"model.weights: there is no tensor {name!r} in them")
        value = self._weights[name]
        if value.shape != shape:
            raise UserError(
                f"model.weights: {name!r} has shape {tuple(value.shape)}, the network needs "
                f"{tuple(shape)}"
            )
        return value


def _tensors(
    module: nn.Module, prefix: str, but: Container[int]
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer below a module: its owner, its name, itself."""
    for path, owner in module.named_modules():
        if id(owner) in but:
            continue
        start = prefix + (f"{path}." if path else "")
        for found in (owner._parameters, owner._buffers):
            for name, tensor in found.items():
                if tensor is not None:
                    yield owner, start + name, tensor
