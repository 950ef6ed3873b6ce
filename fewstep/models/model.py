"""The adapter between one family of networks and the rest of Fewstep."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fewstep.diffusion.guidance import guide
from fewstep.diffusion.paths import Path
from fewstep.diffusion.prediction import Prediction, PredictionKind
from fewstep.errors import UserError
from fewstep.models.encoders import Autoencoder, Decoder, Encoding, PromptEncoder

Condition = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class Pretrained:
    """A network whose weights are still where they come from.

    Attributes:
        network: its structure; parameters are on the meta device, buffers have their values.
        weights: values of the parameters by name; read only when asked for.
    """

    network: nn.Module
    weights: Mapping[str, Tensor]


def empty_network(make_network: Callable[[], nn.Module]) -> nn.Module:
    """A network in eval mode whose parameters take no memory; buffers have their values."""
    with parameters_on_meta():
        return make_network().eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let every parameter lose its memory as soon as a module has it; tied ones stay tied.

    Accelerate's `init_empty_weights` would part them, so that what is saved has other names.
    """
    register, moved = nn.Module.register_parameter, WeakTensorKeyDictionary()

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in moved:
                empty = parameter.detach().to("meta")
                moved[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            parameter = moved[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def pretrained(network: nn.Module) -> Pretrained:
    """A network in memory, taken apart."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in network.parameters()
    }
    return Pretrained(copy.deepcopy(network, memo), network.state_dict())


@runtime_checkable
class SizedByWeights(Protocol):
    """Settings of a family whose networks have any size, which trained weights state.

    Attributes:
        weights: a run directory, or what `with_network_of` takes.
        chosen_anew: fields in which a run may differ from the one that its weights are from.
    """

    chosen_anew: ClassVar[frozenset[str]]

    @property
    def weights(self) -> str | None:
        """A run directory, or what `with_network_of` takes."""

    def with_network_of(self, directory: FilePath) -> Any:
        """These settings with the size that a directory states; UserError where it has none."""


class Model(ABC):
    """What a network family needs to be trained, sampled and exported.

    Single-device code: no ranks, no sharding. The adapter holds no weights; networks are passed
    in, so that one adapter serves every role.

    Attributes:
        path: the noising path that the networks were trained on.
        prediction: what the networks predict.
        sample_shape: shape of one (latent) sample.
        classes: number of classes, or None for an unconditional network.
        supports_guidance: whether there is an unconditional prediction to guide away from.
        guidance_distilled: whether the teacher has guidance distilled into it already.
        prompted: whether the networks are conditioned on prompts; data are encoded beforehand.
        lora_targets: module names that LoRA adapts by default (suffixes, as PEFT matches them).
    """

    path: Path
    prediction: PredictionKind
    sample_shape: tuple[int, ...]
    classes: int | None = None
    supports_guidance: bool = False
    guidance_distilled: bool = False
    prompted: bool = False
    lora_targets: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def build_network(self) -> nn.Module:
        """A network with fresh weights (from the global generator: seed it around the call)."""

    @abstractmethod
    def load_network(self, directory: FilePath) -> nn.Module:
        """A network with the weights of a directory.

        Raises:
            UserError: where the directory holds no network of this family or broken weights.
        """

    def open_network(self, directory: FilePath) -> Pretrained:
        """The structure of a directory's network, and its weights without reading them yet.

        By default they are read here. Raises as `load_network` does.
        """
        return pretrained(self.load_network(directory))

    @abstractmethod
    def save_network(self, network: nn.Module, directory: FilePath) -> None:
        """Write a network so that `load_network`, and the family's own library, read it."""

    @abstractmethod
    def forward(self, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """The raw network output.

        Args:
            network: a network of this family.
            x: noisy samples [B, *sample_shape].
            sigma: [B].
            condition: what `Batch.condition` holds, each entry [B, ...].

        Returns:
            A prediction of kind `prediction`, like `x`.
        """

    def unconditional(self, condition: Condition) -> Condition:
        """The condition that stands for none, of the same shapes.

        Raises:
            ValueError: where the family has none.
        """
        raise ValueError(f"{type(self).__name__} has no unconditional prediction")

    def take_unconditional(self, condition: Condition) -> None:  # noqa: B027
        """Be told the condition that stands for none, by the data that a run learns from.

        Args:
            condition: each entry [...], without a batch's dimension.
        """

    def prompt_encoder(self, device: torch.device, dtype: torch.dtype) -> PromptEncoder:
        """What turns prompts into conditions, loaded onto a device.

        Raises:
            UserError: where the family takes no prompts, or its encoders cannot be loaded.
        """
        raise UserError(f"model: {type(self).__name__} takes no prompts")

    def autoencoder(self, device: torch.device, dtype: torch.dtype) -> Autoencoder | None:
        """What is between images and latents, loaded onto a device; None: networks see images.

        Raises:
            UserError: where it cannot be loaded.
        """
        return None

    def decoder(self) -> Decoder | None:
        """What makes images of latents, as far as it is known without loading it.

        None: networks see images.
        """
        return None

    def encoding(self) -> Encoding:
        """What decides how prompts and images are encoded, found without loading anything.

        By default nothing is known of it, and a run cannot notice that it has changed.
        """
        return Encoding()

    def student_network(self, teacher: nn.Module) -> nn.Module:
        """The network that student and fake_score start from: a copy of the teacher.

        The teacher's parameters may be on the meta device; those of a copy get the teacher's
        values later, and those that are on another device keep their own.
        """
        return copy.deepcopy(teacher)

    def blocks(self, network: nn.Module) -> dict[str, nn.Module]:
        """The parts of a network, by name, that are sharded, gathered and recomputed as one.

        By default the members of every `nn.ModuleList` that is the network's own.
        """
        return listed_modules(network)

    def feature_blocks(self, network: nn.Module) -> dict[str, nn.Module]:
        """The parts of a network, by name and in order, whose outputs a classifier may look at.

        By default the members of every `nn.ModuleList` that is the network's own.
        """
        return listed_modules(network)

    def block_features(self, output: Any) -> Tensor:
        """What one of `feature_blocks` has returned, as tokens [B, T, D].

        By default for tensors: tokens [B, T, D] as they are, vectors [B, D] as one token, maps
        [B, D, H, W] as one for each place.

        Raises:
            UserError: for anything else.
        """
        if isinstance(output, Tensor) and output.ndim in (2, 3, 4):
            if output.ndim == 4:
                return output.flatten(2).transpose(1, 2)
            return output if output.ndim == 3 else output[:, None, :]
        shaped = isinstance(output, Tensor)
        what = f"shape {list(output.shape)}" if shaped else type(output).__name__
        raise UserError(
            f"method.adversarial.blocks: a block of this network returns {what}, which is neither "
            f"tokens [B, T, D] nor a map [B, D, H, W]; {type(self).__name__}.block_features must "
            f"make tokens of it"
        )

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in [-1, 1] (or the data's own form) to samples."""
        return images

    def decode(self, samples: Tensor) -> Tensor:
        """Samples to images; the inverse of `encode`."""
        return samples

    def example_condition(self, count: int) -> dict[str, Tensor]:
        """Some valid condition of `count` samples, for checks and estimates."""
        if self.classes is None:
            return {}
        return {"class_labels": torch.arange(count) % self.classes}

    @final
    def example_call(
        self, count: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Condition]:
        """What a network may be called with, for checks and estimates.

        Args:
            count: of samples, B.
            device: of all.
            dtype: of what is floating-point.

        Returns:
            x [B, ...], zeros; sigma [B], 0.5; entries [B, ...].
        """
        x = torch.zeros(count, *self.sample_shape, device=device, dtype=dtype)
        condition = {
            key: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for key, value in self.example_condition(count).items()
        }
        return x, x.new_full((count,), 0.5), condition


def listed_modules(network: nn.Module) -> dict[str, nn.Module]:
    """The members of every `nn.ModuleList` that is the network's own, by name."""
    return {
        f"{name}.{index}": block
        for name, child in network.named_children()
        if isinstance(child, nn.ModuleList)
        for index, block in enumerate(child)
    }


@final
@dataclass(frozen=True)
class Denoiser:
    """One role's network, ready to call; only valid while the role is in use.

    Attributes:
        model: the adapter.
        network: the module that holds the role's weights.
        check_active: raises if another role has been activated on the same module.
        check_backward: called in the backward pass; raises if another role is in use there.
    """

    model: Model
    network: nn.Module
    check_active: Callable[[], None]
    check_backward: Callable[[], None] = lambda: None

    def __call__(self, x: Tensor, sigma: Tensor, condition: Condition) -> Prediction:
        """One network call.

        Args:
            x: noisy samples [B, ...].
            sigma: exact level, [B] or [].
            condition: entries [B, ...].
        """
        self.check_active()
        output = self.model.forward(self.network, x, sigma.expand(len(x)), condition).to(x.dtype)
        if output.requires_grad:
            # Checkpointed layers run forward again in the backward pass: with another adapter
            # in force then, all gradients would exist, and be wrong.
            output.register_hook(lambda gradient: self.check_backward())  # type: ignore[no-untyped-call]
        return Prediction(self.model.prediction, output, x, sigma, self.model.path)

    def guided(self, x: Tensor, sigma: Tensor, condition: Condition, scale: float) -> Prediction:
        """The guided prediction u + scale * (c - u): one network call at scale 1, else two.

        Every kind of prediction is affine in the others at fixed x and sigma, so guiding the
        raw output is guiding any of them.
        """
        conditional = self(x, sigma, condition)
        if scale == 1:
            return conditional
        unconditional = self(x, sigma, self.model.unconditional(condition))
        output = guide(conditional.output, unconditional.output, scale)
        return Prediction(self.model.prediction, output, x, sigma, self.model.path)
