"""DiT: class-conditional transformers of diffusers (`DiTTransformer2DModel`)."""

from __future__ import annotations

import inspect
from pathlib import Path as FilePath
from typing import Annotated, Any, ClassVar, Literal, cast, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fewstep.diffusion.paths import RectifiedFlow
from fewstep.diffusion.prediction import PredictionKind
from fewstep.errors import UserError
from fewstep.models.files import (
    load_diffusers_network,
    open_diffusers_network,
    read_network_config,
    settings_from,
)
from fewstep.models.model import Condition, Model, Pretrained
from fewstep.settings import Settings

Positive = Annotated[int, Field(gt=0)]


def network_class() -> Any:
    """Diffusers' class. It takes seconds to import, and recipes are checked without it."""
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    return DiTTransformer2DModel


@final
class DiTNetwork(Settings):
    """Size of a DiT, in the words of diffusers' `DiTTransformer2DModel`."""

    sample_size: Positive = Field(8, description="height and width of a sample")
    in_channels: Positive = Field(1, description="channels of a sample")
    patch_size: Positive = Field(2, description="side of a token's patch")
    num_layers: Positive = Field(4, description="transformer blocks")
    num_attention_heads: Positive = Field(4, description="heads of each block")
    attention_head_dim: Positive = Field(16, description="width of each head")
    num_embeds_ada_norm: Positive = Field(10, description="number of classes")

    @model_validator(mode="after")
    def _check(self) -> DiTNetwork:
        if self.sample_size % self.patch_size != 0:
            raise ValueError(
                f"sample_size ({self.sample_size}) must be a multiple of patch_size "
                f"({self.patch_size}): a sample is cut into whole patches"
            )
        return self


@final
class DiTSettings(Settings):
    """A DiT: new (`network` alone) or with trained weights (`weights`)."""

    family: Literal["dit"] = "dit"
    weights: str | None = Field(
        None, description="a run directory, or a directory that diffusers wrote"
    )
    network: DiTNetwork | None = Field(
        None, description="size of a new network; with weights it is read from them"
    )
    prediction: PredictionKind = Field("velocity", description="what the network predicts")
    timestep_scale: Annotated[float, Field(gt=0)] = Field(
        1000.0, description="the network is told sigma times this"
    )
    guidance_distilled: bool = Field(
        False, description="the teacher has guidance distilled into it: do not guide it again"
    )

    chosen_anew: ClassVar[frozenset[str]] = frozenset({"weights"})

    @model_validator(mode="after")
    def _check(self) -> DiTSettings:
        if self.weights is None and self.network is None:
            raise ValueError("give 'weights' (trained ones) or 'network' (the size of a new one)")
        return self

    def with_network_of(self, directory: FilePath) -> DiTSettings:
        """These settings with the size that a diffusers directory states.

        Raises:
            UserError: where it is no DiT, uses options that are not supported, or differs from
                the size given here.
        """
        config = read_network_config(directory, "DiTTransformer2DModel")
        defaults = inspect.signature(network_class().__init__).parameters
        size = {key: config.pop(key) for key in DiTNetwork.model_fields if key in config}
        odd = {k: v for k, v in config.items() if k in defaults and v != defaults[k].default}
        if odd.get("out_channels") == size.get("in_channels"):
            del odd["out_channels"]
        if odd:
            raise UserError(f"{directory}/config.json: {odd} is not supported")
        network = settings_from(DiTNetwork, size, directory / "config.json")
        if self.network not in (None, network):
            raise UserError(f"model.network differs from {directory}/config.json: {network!r}")
        return self.model_copy(update={"network": network})

    def build(self) -> Model:
        """The adapter, without weights."""
        assert self.network is not None, "resolve the weights first"
        return DiT(self.network, self.prediction, self.timestep_scale, self.guidance_distilled)


@final
class DiT(Model):
    """Adapter for `DiTTransformer2DModel` as a rectified flow on pixels or latents.

    Condition: `class_labels`, int64 [B]; the label `classes` is the network's own null label.
    """

    lora_targets: ClassVar[tuple[str, ...]] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "ff.net.0.proj",
        "ff.net.2",
    )

    def __init__(
        self,
        config: DiTNetwork,
        prediction: PredictionKind = "velocity",
        timestep_scale: float = 1000.0,
        guidance_distilled: bool = False,
    ) -> None:
        """`config`: the networks' size; the rest is as in `DiTSettings`."""
        self.config = config
        self.prediction = prediction
        self.path = RectifiedFlow(timestep_scale)
        self.guidance_distilled = guidance_distilled
        self.sample_shape = (config.in_channels, config.sample_size, config.sample_size)
        self.classes = config.num_embeds_ada_norm
        self.supports_guidance = True

    def build_network(self) -> nn.Module:
        """A new network, in eval mode (train mode would drop labels by a global generator)."""
        return cast(nn.Module, network_class()(**self.config.model_dump()).eval())

    def load_network(self, directory: FilePath) -> nn.Module:
        """Weights of a directory that diffusers wrote."""
        return load_diffusers_network(network_class(), directory)

    def open_network(self, directory: FilePath) -> Pretrained:
        """See `Model.open_network`."""
        return open_diffusers_network(self.build_network, directory)

    def save_network(self, network: nn.Module, directory: FilePath) -> None:
        """Write the directory that `DiTTransformer2DModel.from_pretrained` reads."""
        network.save_pretrained(directory)  # type: ignore[operator]

    def blocks(self, network: nn.Module) -> dict[str, nn.Module]:
        """All transformer blocks but the first, whose embedding the network calls by itself."""
        return {k: b for k, b in super().blocks(network).items() if k != "transformer_blocks.0"}

    def forward(self, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """See `Model.forward`."""
        timestep = self.path.timestep(sigma)
        (output,) = network(x, timestep, condition["class_labels"], return_dict=False)
        return cast(Tensor, output)

    def unconditional(self, condition: Condition) -> Condition:
        """The null label for every sample."""
        labels = condition["class_labels"]
        return {"class_labels": torch.full_like(labels, self.config.num_embeds_ada_norm)}
