"""What the blocks of a network give on the way to its output: features for a classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from fewstep.diffusion.prediction import Prediction
from fewstep.errors import UserError
from fewstep.models.model import Condition, Denoiser, Model, pretrained


@final
@dataclass(frozen=True)
class FeatureExtractor:
    """One role's network, to be looked at; only valid while the role is in use.

    Attributes:
        denoiser: calls the network.
        blocks: those that are looked at, by name.
    """

    denoiser: Denoiser
    blocks: Mapping[str, nn.Module]

    def __call__(self, x: Tensor, sigma: Tensor, condition: Condition) -> list[Tensor]:
        """One network call; the tokens of every block, in order: each [B, T, D].

        Args:
            x: noisy samples [B, ...].
            sigma: exact level, [B] or [].
            condition: entries [B, ...].
        """
        return self.predict(x, sigma, condition)[1]

    def predict(
        self, x: Tensor, sigma: Tensor, condition: Condition
    ) -> tuple[Prediction, list[Tensor]]:
        """The same call; its prediction, and the tokens."""
        with captured(self.blocks) as found:
            prediction = self.denoiser(x, sigma, condition)
        model, output = self.denoiser.model, prediction.output
        tokens = [model.block_features(found[name]).to(x.dtype) for name in self.blocks]
        if output.requires_grad:
            tokens = list(_Tied.apply(output, *tokens))  # type: ignore[no-untyped-call]
        return prediction, tokens


class _Tied(torch.autograd.Function):
    """The features, whose backward pass goes through the network's output too, with zeros.

    A network that is sharded is gathered again, for a backward pass, where that enters at its
    output; it must not come upon weights that were left out.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
        ctx.like = {"size": output.shape, "dtype": output.dtype, "device": output.device}
        return tuple(feature.view_as(feature) for feature in features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros(**ctx.like), *gradients


@contextmanager
def captured(blocks: Mapping[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """Write down what blocks return in the calls of the block of code: name -> the last output.

    Raises:
        UserError: at the end, naming a block that was not called.
    """
    found: dict[str, Any] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        found[name] = output

    handles = [block.register_forward_hook(partial(keep, name)) for name, block in blocks.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for name in blocks:
        if name not in found:
            raise UserError(f"method.adversarial.blocks: the network never calls {name!r}")


def select_blocks(
    model: Model, network: nn.Module, names: Sequence[str] | None
) -> dict[str, nn.Module]:
    """Blocks of a network that features may be taken from.

    Args:
        model: the adapter.
        network: of its family; however it is spread.
        names: the wanted ones; None: the one in the middle, as DMD2 takes the bottleneck of its
            U-Net (Yin et al., arXiv 2405.14867, section 4.3).

    Raises:
        UserError: naming what does not exist, and what does.
    """
    known = model.feature_blocks(network)
    chosen = list(known)[len(known) // 2 :][:1] if names is None else list(names)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        wanted = ", ".join(map(repr, unknown)) or "the middle block"
        there = f"there are: {', '.join(known)}" if known else "the network has no blocks"
        raise UserError(f"method.adversarial.blocks: {wanted} is not there; {there}")
    return {name: known[name] for name in chosen}


def feature_widths(model: Model, network: nn.Module, names: Sequence[str] | None) -> list[int]:
    """The widths D of the tokens of some blocks, found by a call without numbers.

    Args:
        model: the adapter.
        network: the plain one; its parameters may be on the meta device.
        names: as in `select_blocks`.

    Raises:
        UserError: where a block does not exist, or the network cannot be called so.
    """
    trial = pretrained(network).network.to("meta")
    dtype = next((p.dtype for p in trial.parameters() if p.is_floating_point()), torch.float32)
    x, sigma, condition = model.example_call(2, "meta", dtype)
    blocks = select_blocks(model, trial, names)
    with captured(blocks) as found, torch.no_grad():
        _call_without_numbers(lambda: model.forward(trial, x, sigma, condition))
    return [int(model.block_features(found[name]).shape[-1]) for name in blocks]


def _call_without_numbers(call: Callable[[], object]) -> None:
    try:
        with torch.device("meta"):
            call()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            f"method.adversarial: the width of the network's blocks is found by a call on torch's "
            f"meta device, which this network does not stand: {lines[0]}"
        ) from error
