"""What a forward pass keeps for its backward pass, counted without running it.

The network is called on tensors without memory (torch's meta device), with a hook that sees every
tensor that autograd keeps. Blocks that are alike are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fewstep.diffusion.gan import exact_r1
from fewstep.models.block_features import FeatureExtractor, select_blocks
from fewstep.models.model import Denoiser, Model

# Of torch's autocast on CUDA: those that networks of these kinds call.
LOWERED = (
    *("linear", "conv1d", "conv2d", "conv3d", "matmul", "__matmul__", "bmm", "mm", "addmm"),
    *("baddbmm", "scaled_dot_product_attention"),
)
RAISED = (
    *("layer_norm", "group_norm", "softmax", "log_softmax", "pow", "__pow__", "exp", "log"),
    *("rsqrt", "norm", "cumsum"),
)


R1_PASSING = 0.25
"""What comes and goes while exact R1 differentiates twice, as a share of what it keeps: measured on
transformers of 4, 8 and 12 layers and 1024 tokens."""


@final
@dataclass(frozen=True)
class Kept:
    """Bytes that a forward pass keeps for its backward pass; weights are not among them.

    Attributes:
        everything: without activation checkpointing.
        checkpointed: with it: what is kept outside of blocks, and the blocks' inputs.
        block: what the largest block keeps beyond its inputs.
        trained_copies: weights that were cast to a lower precision and are trained: autocast
            keeps them until the end of the pass.
        frozen_copies: those that are not.
        block_copies: of both, the largest block's.
    """

    everything: int
    checkpointed: int
    block: int
    trained_copies: int = 0
    frozen_copies: int = 0
    block_copies: int = 0

    def activations(self, recompute: bool, at_once: int, graphs: int = 1) -> int:
        """What a student's micro-batch needs while it is scored, and then goes backward.

        Its graph stays alive while the scores run, whose passes keep nothing but hold, at any
        time, no more than a block would keep. A backward pass computes a block again, or holds
        gradients of its tensors.

        Args:
            recompute: activation checkpointing.
            at_once: samples of the largest call over those of the micro-batch.
            graphs: passes whose graphs are there together; with an adversarial head, that of the
                network it looks into as well.
        """
        kept = self.checkpointed if recompute else self.everything
        return kept * graphs + self.block * max(1, at_once)

    def copies(self, recompute: bool) -> int:
        """Weights in lower precision, where they are not gathered in it.

        Autocast keeps a copy of each trained weight to the end of a pass; a graph keeps what it
        has multiplied with, while another trained network scores.
        """
        if recompute:
            return max(self.trained_copies, self.block_copies)
        return 2 * self.trained_copies + self.frozen_copies


def kept_by_forward(
    model: Model,
    network: nn.Module,
    samples: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
) -> Kept:
    """Count for a network of a model, whose weights may be on the meta device.

    Args:
        model: the adapter.
        network: with the role in force that is trained.
        samples: of a micro-batch.
        dtype: of the samples.
        compute_dtype: of matrix products, under autocast; None: dtype.

    Raises:
        RuntimeError, NotImplementedError: where the network needs values to be called.
    """
    device = next(iter(network.parameters())).device
    x, sigma, condition = model.example_call(samples, device, dtype)
    counter = _Counter(network)
    with counter.watching(model.blocks(network)), _Lowered(compute_dtype, counter):
        model.forward(network, x, sigma, condition)
    return counter.result()


def kept_by_exact_r1(
    model: Model,
    network: nn.Module,
    head: nn.Module,
    blocks: Sequence[str] | None,
    samples: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
) -> int:
    """Bytes that `fewstep.diffusion.gan.exact_r1` keeps until its last backward pass is done.

    Whatever is recomputed: a backward pass that has a graph itself keeps what it has computed
    again. No block stands for those that are alike, and none for attention's weights of all pairs.

    Args:
        model: the adapter.
        network: that the classifier looks into, none of its weights with gradients.
        head: the classifier, on the same device.
        blocks: names of those that it sees; None: the one in the middle.
        samples: real ones of a micro-batch.
        dtype: of the samples.
        compute_dtype: see `kept_by_forward`.

    Raises:
        RuntimeError, NotImplementedError: where the network needs values to be called.
    """
    device = next(iter(network.parameters())).device
    x, sigma, condition = model.example_call(samples, device, dtype)
    denoiser = Denoiser(model, network, check_active=lambda: None)
    features = FeatureExtractor(denoiser, select_blocks(model, network, blocks))
    counter = _Counter(nn.ModuleList([network, head]))
    with (
        saved_tensors_hooks(counter.keep, lambda tensor: tensor),
        _Lowered(compute_dtype, counter, fused=False),
    ):
        exact_r1(lambda x: features(x, sigma, condition), lambda tokens: head(*tokens)[:, 0], x)
    return _size(counter.kept.values())


@final
class _Counter:
    """Storages that are kept, each once, and where: by their identity, which they keep alive."""

    def __init__(self, network: nn.Module) -> None:
        weights = [*network.parameters(), *network.buffers()]
        self.weights = {t.untyped_storage()._cdata: t.requires_grad for t in weights}
        self.kept: dict[int, torch.UntypedStorage] = {}
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.inputs: dict[int, torch.UntypedStorage] = {}
        self.copies: dict[int, tuple[torch.UntypedStorage, bool, str]] = {}
        self.hidden = 0  # of blocks that were not run
        self.hidden_copies = [0, 0]
        self.largest = 0
        self.block = ""
        self._runs: dict[Any, _Run] = {}

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Count what is kept in the block, and run only one of the blocks that are alike."""
        forwards = {block: block.forward for block in dict.fromkeys(blocks.values())}
        names = {block: name for name, block in blocks.items()}
        for block, forward in forwards.items():
            block.forward = partial(self._call, names[block], block, forward)
        try:
            with saved_tensors_hooks(self.keep, lambda tensor: tensor):
                yield
        finally:
            for block, forward in forwards.items():
                block.forward = forward

    def keep(self, tensor: Tensor) -> Tensor:
        """What autograd does with a tensor that it keeps."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.weights and storage._cdata not in self.copies:
            self.kept[storage._cdata] = storage
            if not self.block:
                self.outside[storage._cdata] = storage
        return tensor

    def copied(self, weight: Tensor, copy: Tensor) -> None:
        """A weight was cast."""
        storage = copy.untyped_storage()
        self.copies[storage._cdata] = (storage, weight.requires_grad, self.block)

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        return tensor.untyped_storage()._cdata in self.weights

    def _call(
        self, name: str, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        given = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.inputs |= {s._cdata: s for s in given}
        alike = (_signature(block), *map(_look, tree_leaves((args, kwargs))))
        run = self._runs.get(alike)
        if run is not None:
            return self._repeat(run, given)
        before, copied, self.block = set(self.kept), set(self.copies), name
        # What another block has kept of the same inputs is not new, but kept here too.
        held = {s._cdata: self.kept.pop(s._cdata) for s in given if s._cdata in self.kept}
        output = forward(*args, **kwargs)
        self.block = ""
        mine = {k: s for k, s in self.kept.items() if k not in before or k in held}
        self.kept |= held
        made = [t.untyped_storage() for t in tree_leaves(output) if isinstance(t, Tensor)]
        ends = {s._cdata for s in (*given, *made)}
        casts = [self.copies[k] for k in self.copies if k not in copied]
        self._runs[alike] = _Run(
            output,
            tuple(s._cdata in mine for s in given),
            tuple(s._cdata in mine for s in made),
            _size(s for k, s in mine.items() if k not in ends),
            (_size(s for s, t, _ in casts if t), _size(s for s, t, _ in casts if not t)),
        )
        given_too = {s._cdata for s in given}
        self.largest = max(self.largest, _size(s for k, s in mine.items() if k not in given_too))
        return output

    def _repeat(self, run: _Run, given: Sequence[torch.UntypedStorage]) -> Any:
        """The outcome of a block that is like one that was run."""
        output = tree_map_only(Tensor, _again, run.output)
        made = [t.untyped_storage() for t in tree_leaves(output) if isinstance(t, Tensor)]
        for storages, flags in ((given, run.keeps_given), (made, run.keeps_made)):
            for storage, kept in zip(storages, flags, strict=True):
                if kept and storage._cdata not in self.weights:
                    self.kept[storage._cdata] = storage
        self.hidden += run.inside
        self.hidden_copies = [a + b for a, b in zip(self.hidden_copies, run.copies, strict=True)]
        return output

    def result(self) -> Kept:
        """The sums."""
        of_blocks: dict[str, int] = {}
        for storage, _, block in self.copies.values():
            of_blocks[block] = of_blocks.get(block, 0) + storage.nbytes()
        copies = list(self.copies.values())
        return Kept(
            everything=_size(self.kept.values()) + self.hidden,
            checkpointed=_size({**self.outside, **self.inputs}.values()),
            block=self.largest,
            trained_copies=_size(s for s, t, _ in copies if t) + self.hidden_copies[0],
            frozen_copies=_size(s for s, t, _ in copies if not t) + self.hidden_copies[1],
            block_copies=max(of_blocks.values(), default=0),
        )


@final
@dataclass(frozen=True)
class _Run:
    """What a block has kept: which of its inputs and outputs, and bytes of the rest."""

    output: Any
    keeps_given: tuple[bool, ...]
    keeps_made: tuple[bool, ...]
    inside: int
    copies: tuple[int, int]


@final
class _Lowered(TorchFunctionMode):
    """Torch's autocast as it is on CUDA, for tensors of any device."""

    def __init__(self, dtype: torch.dtype | None, counter: _Counter, fused: bool = True) -> None:
        """`fused`: whether attention has a kernel of its own."""
        super().__init__()
        self._dtype, self._counter, self._fused = dtype, counter, fused
        self._cache: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self._dtype is not None and name in LOWERED + RAISED:
            cast = partial(self._cast, self._dtype if name in LOWERED else torch.float32)
            args, kwargs = tree_map_only(Tensor, cast, (args, dict(kwargs or {})))
        if name == "scaled_dot_product_attention" and self._fused:
            return _fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _cast(self, dtype: torch.dtype, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        if not self._counter.is_weight(tensor):
            return tensor.to(dtype)
        if tensor.requires_grad and id(tensor) in self._cache:
            return self._cache[id(tensor)]
        copy = tensor.to(dtype)
        self._counter.copied(tensor, copy)
        if tensor.requires_grad:
            self._cache[id(tensor)] = copy
        return copy


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by a kernel that keeps its inputs, its output and a number for each row.

    Without memory torch would choose the plain one, which keeps the weights of all pairs.
    """
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output


def _again(tensor: Tensor) -> Tensor:
    """Another tensor of the same kind, with a graph where it had one."""
    new = torch.empty_like(tensor, requires_grad=tensor.requires_grad)
    # What others change in place must be no leaf.
    return new.clone() if tensor.requires_grad else new


def _look(leaf: Any) -> Any:
    """What of an argument decides how a block computes with it."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return repr(leaf)


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """Blocks with the same one keep as much."""
    return (
        type(block),
        *((n, type(m), getattr(m, "approximate", None)) for n, m in block.named_modules()),
        *((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()),
    )


def _size(storages: Any) -> int:
    return sum(storage.nbytes() for storage in storages)
