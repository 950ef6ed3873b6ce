"""How a network computes: in lower precision, or recomputing instead of remembering.

Both replace `forward` of a module, from outside, by a partial that a copy of the module copies
along; names of parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(blocks: Iterable[nn.Module]) -> None:
    """Keep only the input of each block for the backward pass (Chen et al., arXiv 1604.06174)."""
    for block in blocks:
        block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # The networks draw nothing from a global generator: there is no state of it to keep.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def compute_in(network: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Run a network under autocast: matrix products in `dtype`, sums and norms in float32.

    Unlike casting every input, this leaves the timestep exact: 999.3 has no bfloat16.
    """
    network.forward = partial(_autocast, network.forward, dtype, device_type)
    if device_type == "cpu":
        # FSDP gathers a norm's weights in `dtype`; autocast sees to those on accelerators alone.
        for module in network.modules():
            if type(module) in (nn.LayerNorm, nn.GroupNorm):
                module.forward = partial(_norm, module)


def _norm(norm: Any, input: Tensor) -> Tensor:
    """A LayerNorm or GroupNorm whose weights may be in a lower precision than its input."""
    weight, bias = (
        None if p is None else p.to(torch.promote_types(p.dtype, input.dtype))
        for p in (norm.weight, norm.bias)
    )
    if isinstance(norm, nn.GroupNorm):
        return nn.functional.group_norm(input, norm.num_groups, weight, bias, norm.eps)
    return nn.functional.layer_norm(input, norm.normalized_shape, weight, bias, norm.eps)


def _autocast(
    forward: Callable[..., Any], dtype: torch.dtype, device_type: str, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device_type, dtype):
        return forward(*args, **kwargs)


@contextmanager
def full_precision(network: nn.Module) -> Iterator[None]:
    """Let a network compute without the autocast of `compute_in` for the block."""
    wrapped = network.__dict__.get("forward")
    if not (isinstance(wrapped, partial) and wrapped.func is _autocast):
        yield
        return
    network.forward = wrapped.args[0]
    try:
        yield
    finally:
        network.forward = wrapped
