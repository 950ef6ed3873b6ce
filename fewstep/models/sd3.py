"""Stable Diffusion 3 and 3.5: text-to-image transformers of diffusers (`SD3Transformer2DModel`)."""

from __future__ import annotations

import inspect
import math
from pathlib import Path as FilePath
from typing import Annotated, Any, ClassVar, Literal, cast, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fewstep.diffusion.paths import RectifiedFlow
from fewstep.errors import UserError
from fewstep.models.encoders import Autoencoder, Decoder, Encoding, PromptEncoder
from fewstep.models.files import (
    exported_shift,
    load_opened_network,
    open_diffusers_network,
    read_network_config,
    settings_from,
)
from fewstep.models.hub import directory_of, present_directory_of
from fewstep.models.model import Condition, Model, Pretrained
from fewstep.models.sd3_files import (
    DOWNSCALE,
    SCHEDULER,
    check_pipeline,
    read_scheduler_config,
    shift_of,
    transformer_directory,
)
from fewstep.models.sd3_network import NETWORK_CLASS, Positive, SD3Network, network_class
from fewstep.settings import Settings

CLIP_LENGTH = 77


@final
class SD3Settings(Settings):
    """Stable Diffusion 3 or 3.5: trained (`weights`), or a new network of that kind (`network`)."""

    family: Literal["sd3"] = "sd3"
    weights: str | None = Field(
        None,
        description="a run directory; a pipeline or a transformer as diffusers writes it; or a "
        "name on the Hugging Face hub, such as stabilityai/stable-diffusion-3.5-medium, with "
        "@REVISION after it for one commit, branch or tag",
    )
    network: SD3Network | None = Field(
        None, description="size of a new network; with weights it is read from them"
    )
    pipeline: str | None = Field(
        None,
        description="where text encoders, autoencoder and scheduler are: a pipeline's directory "
        "or a name on the hub; by default the weights, if they are a whole pipeline. Without "
        "one, samples are pixels",
    )
    resolution: Positive | None = Field(
        None, description="height and width of images, in pixels; null: what the network states"
    )
    max_sequence_length: Annotated[int, Field(gt=0, le=512)] = Field(
        256,
        description="tokens of a prompt that the T5 encoder, or `text_encoder`, sees; shorter "
        "prompts are padded",
    )
    text_encoder: str | None = Field(
        None,
        description="one encoder instead of a pipeline's three: the directory of a transformers "
        "model with its tokenizer, or package:NAME for an installed package that carries one",
    )
    guidance_distilled: bool = Field(
        False, description="the teacher has guidance distilled into it: do not guide it again"
    )

    chosen_anew: ClassVar[frozenset[str]] = frozenset({"weights", "resolution"})

    @model_validator(mode="after")
    def _check(self) -> SD3Settings:
        if self.weights is None and self.network is None:
            raise ValueError("give 'weights' (trained ones) or 'network' (the size of a new one)")
        if self.network is not None and self.weights is None:
            self.sample_size_of(self.network)
        return self

    def sample_size_of(self, network: SD3Network) -> int:
        """Height and width of a sample; raises ValueError where the network cannot take it."""
        if self.resolution is None:
            return network.sample_size
        scale = DOWNSCALE if self.pipeline is not None else 1
        if self.resolution % scale != 0:
            raise ValueError(f"resolution ({self.resolution}) must be a multiple of {scale}")
        size = self.resolution // scale
        name = "resolution" if scale == 1 else f"resolution / {scale}"
        network.check_size(size, name)
        return size

    def with_network_of(self, directory: FilePath) -> SD3Settings:
        """These settings with the size that a directory or a name on the hub states.

        Raises:
            UserError: where there is no such network, it uses options that are not supported, it
                differs from the size given here, or does not fit its pipeline.
        """
        whole = present_directory_of(str(directory), "model.weights")
        given = transformer_directory(whole)
        config = read_network_config(given, NETWORK_CLASS)
        defaults = inspect.signature(network_class().__init__).parameters
        size = {key: config.pop(key) for key in SD3Network.model_fields if key in config}
        # Its own defaults are those of a class, and ours another's.
        size = {key: defaults[key].default for key in SD3Network.model_fields} | size
        odd = {k: v for k, v in config.items() if k in defaults and v != defaults[k].default}
        if config.get("out_channels", 16) in (size["in_channels"], None):
            odd.pop("out_channels", None)
        elif "out_channels" not in odd:
            odd["out_channels"] = config.get("out_channels", 16)
        if odd:
            raise UserError(f"{given}/config.json: {odd} is not supported")
        network = settings_from(SD3Network, size, given / "config.json")
        if self.network not in (None, network):
            raise UserError(
                f"model.network differs from {given}/config.json: {network!r}; leave it out "
                f"(model.network=null), and that is taken"
            )
        pipeline = self.pipeline
        if pipeline is None and (whole / "vae").is_dir():
            pipeline = str(directory)
        settings = self.model_copy(update={"network": network, "pipeline": pipeline})
        if pipeline is not None:
            check_pipeline(present_directory_of(pipeline, "model.pipeline"), network.in_channels)
        settings.build()
        return settings

    def build(self) -> SD3:
        """The adapter, without weights.

        Raises:
            UserError: where the resolution does not fit the network.
        """
        assert self.network is not None, "resolve the weights first"
        try:
            size = self.sample_size_of(self.network)
        except ValueError as error:
            raise UserError(f"model.{error}") from error
        return SD3(self, self.network, size)


@final
class SD3(Model):
    """Adapter for `SD3Transformer2DModel`: a rectified flow on latents, or on pixels.

    Condition: `prompt_embeds`, float [B, L, D], and `pooled`, float [B, P]. All prompts have the
    same L: the network takes no mask, and sees the padding, as it did when it was trained.

    Attributes:
        settings: the recipe's model section, resolved.
        config: the networks' size.
    """

    # All of the attention: of image and text, and in 3.5 Medium also that of the image alone.
    # Diffusers' train_dreambooth_lora_sd3.py trains these by default, but for the last kind.
    lora_targets: ClassVar[tuple[str, ...]] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )

    def __init__(self, settings: SD3Settings, config: SD3Network, sample_size: int) -> None:
        """`settings`: resolved; `config`: its network; `sample_size`: height and width."""
        self.settings = settings
        self.config = config
        self.prediction = "velocity"
        self.path = RectifiedFlow(1000.0)
        self.guidance_distilled = settings.guidance_distilled
        self.sample_shape = (config.in_channels, sample_size, sample_size)
        self.supports_guidance = True
        self.prompted = True
        self._unconditional: dict[str, Tensor] = {}
        self._autoencoders: dict[torch.device, Autoencoder | None] = {}

    def build_network(self) -> nn.Module:
        """A new network, in eval mode."""
        size = self.config.model_dump()
        network = network_class()(**size, out_channels=self.config.in_channels)
        return cast(nn.Module, network.eval())

    def load_network(self, directory: FilePath) -> nn.Module:
        """Weights of a pipeline or a transformer that diffusers wrote, in float32."""
        return load_opened_network(self.open_network(directory), directory)

    def open_network(self, directory: FilePath) -> Pretrained:
        """See `Model.open_network`; also by a name on the hub."""
        found = transformer_directory(directory_of(str(directory), "model.weights"))
        return open_diffusers_network(self.build_network, found)

    def save_network(self, network: nn.Module, directory: FilePath) -> None:
        """Write the directory that `SD3Transformer2DModel.from_pretrained` reads."""
        network.save_pretrained(directory)  # type: ignore[operator]

    def forward(self, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """See `Model.forward`."""
        (output,) = network(
            hidden_states=x,
            timestep=self.path.timestep(sigma),
            encoder_hidden_states=condition["prompt_embeds"].to(x.dtype),
            pooled_projections=condition["pooled"].to(x.dtype),
            return_dict=False,
        )
        return cast(Tensor, output)

    def take_unconditional(self, condition: Condition) -> None:
        """Be told the encoding of the empty prompt."""
        self._unconditional = dict(condition)

    def block_features(self, output: Any) -> Tensor:
        """The tokens of the image; a block gives those of the text before them."""
        _, image = output
        return super().block_features(image)

    def unconditional(self, condition: Condition) -> Condition:
        """The empty prompt for every sample.

        Raises:
            UserError: where the data have not told its encoding.
        """
        if not self._unconditional:
            raise UserError(
                "model: guidance needs the encoding of the empty prompt, and the data have none; "
                "encode it with the other prompts"
            )
        none = {}
        for key, value in condition.items():
            # Kept where it is needed: it is asked for at every guided step.
            own = self._unconditional[key].to(value.device, value.dtype)
            self._unconditional[key] = own
            none[key] = own.expand(len(value), *own.shape)
        return none

    def example_condition(self, count: int) -> dict[str, Tensor]:
        """Random encodings of the shapes that prompts have."""
        generator = torch.Generator().manual_seed(0)
        length, size = self.settings.max_sequence_length, self.config
        if self.settings.text_encoder is None and self.settings.pipeline is not None:
            length += CLIP_LENGTH
        shapes = {
            "prompt_embeds": (length, size.joint_attention_dim),
            "pooled": (size.pooled_projection_dim,),
        }
        return {k: torch.randn(count, *s, generator=generator) for k, s in shapes.items()}

    def schedule_shift(self, resolution: int | None = None) -> float | None:
        """Shift of the schedule that the pipeline samples with; None where there is no pipeline.

        Args:
            resolution: in pixels; by default that of the recipe.

        Raises:
            UserError: where the pipeline's scheduler cannot be read.
        """
        if self.settings.pipeline is None:
            return None
        directory = present_directory_of(self.settings.pipeline, "model.pipeline")
        exported = exported_shift(directory)
        if exported is not None:
            return exported
        size = resolution // DOWNSCALE if resolution is not None else self.sample_shape[-1]
        tokens = (size // self.config.patch_size) ** 2
        config = read_scheduler_config(directory)
        try:
            shift = shift_of(config, tokens)
        except (TypeError, ValueError, ArithmeticError):
            shift = math.nan
        if not 0 < shift < math.inf:
            raise UserError(
                f"{directory / SCHEDULER} says no shift above 0 for {tokens} tokens; give "
                f"method.shift (method.sampling.shift of flow_matching), or mend it"
            )
        return shift

    def prompt_encoder(self, device: torch.device, dtype: torch.dtype) -> PromptEncoder:
        """See `Model.prompt_encoder`: `text_encoder`, or the pipeline's three."""
        from fewstep.models.sd3_encoders import SD3PromptEncoder
        from fewstep.models.text import TextEncoder

        length, size = self.settings.max_sequence_length, self.config
        encoder: TextEncoder | SD3PromptEncoder
        if self.settings.text_encoder is not None:
            encoder = TextEncoder(self.settings.text_encoder, length, device, dtype)
        elif self.settings.pipeline is not None:
            directory = present_directory_of(self.settings.pipeline, "model.pipeline")
            encoder = SD3PromptEncoder(directory, length, size.joint_attention_dim, device, dtype)
        else:
            raise UserError(
                "model: there is nothing to encode prompts with; give model.text_encoder, or a "
                "model.pipeline that has text encoders"
            )
        widths = {"joint_attention_dim": encoder.width, "pooled_projection_dim": encoder.pooled}
        for key, width in widths.items():
            if getattr(size, key) != width:
                raise UserError(
                    f"model: the network's {key} is {getattr(size, key)}, the text encoder gives "
                    f"{width}"
                )
        return encoder

    def autoencoder(self, device: torch.device, dtype: torch.dtype) -> Autoencoder | None:
        """See `Model.autoencoder`: the pipeline's."""
        if self.settings.pipeline is None:
            return None
        from fewstep.models.sd3_encoders import SD3Autoencoder

        directory = present_directory_of(self.settings.pipeline, "model.pipeline")
        return SD3Autoencoder(directory, device, dtype)

    def decoder(self) -> Decoder | None:
        """See `Model.decoder`; nothing is looked up on a hub."""
        if self.settings.pipeline is None:
            return None
        from fewstep.models.sd3_encoders import empty_decoder

        return empty_decoder(FilePath(self.settings.pipeline), self.sample_shape)

    def encoding(self) -> Encoding:
        """See `Model.encoding`: the encoders' own folders, wherever the pipeline lies."""
        from fewstep.models.sd3_encoders import encoder_files
        from fewstep.models.text import encoder_directory

        settings, files = self.settings, {}
        if settings.pipeline is not None:
            pipeline = directory_of(settings.pipeline, "model.pipeline")
            files = encoder_files(pipeline, prompts=settings.text_encoder is None)
        if settings.text_encoder is not None:
            files["text_encoder"] = encoder_directory(settings.text_encoder)
        return Encoding({"max_sequence_length": str(settings.max_sequence_length)}, files)

    def encode(self, images: Tensor) -> Tensor:
        """Images to latents by the pipeline's autoencoder, loaded at the first call."""
        coder = self._loaded_autoencoder(images.device)
        return images if coder is None else coder.encode(images)

    def decode(self, samples: Tensor) -> Tensor:
        """Latents to images by the pipeline's autoencoder, loaded at the first call."""
        coder = self._loaded_autoencoder(samples.device)
        return samples if coder is None else coder.decode(samples)

    def _loaded_autoencoder(self, device: torch.device) -> Autoencoder | None:
        if device not in self._autoencoders:
            self._autoencoders[device] = self.autoencoder(device, torch.float32)
        return self._autoencoders[device]
