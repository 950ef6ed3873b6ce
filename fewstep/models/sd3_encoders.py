"""Prompts and images for Stable Diffusion 3: three text encoders, and an autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.components import checksums, load_component
from fewstep.models.encoders import VAE, Autoencoder, Decoder, PromptEncoder
from fewstep.models.files import read_config
from fewstep.models.sd3_files import AUTOENCODER, DOWNSCALE
from fewstep.models.text import count_longer

CLIP = (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2"))
T5 = ("text_encoder_3", "tokenizer_3")
# Of images at once: one of 1024 by 1024 takes some gigabytes on its way.
PIXELS_AT_ONCE = 2**20


def encoder_files(pipeline: Path, prompts: bool) -> dict[str, Path]:
    """The folders of a pipeline that encode images and, if asked for, prompts, by name."""
    names = [VAE, *(name for pair in (*CLIP, T5) for name in pair if prompts)]
    return {name: pipeline / name for name in names if (pipeline / name).is_dir()}


@final
class SD3PromptEncoder(PromptEncoder):
    """What `StableDiffusion3Pipeline.encode_prompt` gives (arXiv 2403.03206, figure 2).

    The two CLIP encoders' last hidden states but one are put side by side and widened by zeros;
    T5's follow them as further tokens, or zeros where a pipeline has no T5. The pooled encoding
    is that of both CLIP encoders. Padding is encoded like any other token, without a mask.

    Attributes:
        width: of a token's encoding.
        pooled: width of a prompt's pooled encoding.
    """

    def __init__(
        self,
        directory: Path,
        max_sequence_length: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Load the encoders.

        Args:
            directory: of the pipeline.
            max_sequence_length: tokens that T5 sees.
            width: of T5's encoding, where the pipeline has none.
            device: to encode on.
            dtype: to load and encode in.

        Raises:
            UserError: where an encoder is missing or damaged.
        """
        from transformers import (
            CLIPTextModelWithProjection,
            CLIPTokenizer,
            T5EncoderModel,
            T5TokenizerFast,
        )

        self._directory, self._length = directory, max_sequence_length
        self._device, self._dtype = device, dtype
        self._clip = [
            (
                _encoder(CLIPTextModelWithProjection, directory / encoder, device, dtype),
                load_component(CLIPTokenizer, directory / tokenizer),
            )
            for encoder, tokenizer in CLIP
        ]
        self._t5: tuple[Any, Any] | None = None
        if (directory / T5[0]).is_dir():
            model = _encoder(T5EncoderModel, directory / T5[0], device, dtype)
            self._t5 = model, load_component(T5TokenizerFast, directory / T5[1])
            width = model.config.d_model
        self.width = width
        self.pooled = sum(model.config.projection_dim for model, _ in self._clip)
        narrow = sum(model.config.hidden_size for model, _ in self._clip)
        if narrow > width:
            raise UserError(
                f"{directory}: the CLIP encoders' {narrow} channels do not fit into the {width} "
                f"of the third"
            )

    @cached_property
    def identity(self) -> dict[str, str]:  # type: ignore[override]
        """See `PromptEncoder`; read from the files at the first call, which takes its time."""
        folders = [name for pair in (*CLIP, T5) for name in pair]
        present = [name for name in folders if (self._directory / name).is_dir()]
        return {
            "class": type(self).__name__,
            "max_sequence_length": str(self._length),
            "width": str(self.width),
            "dtype": str(self._dtype).removeprefix("torch."),
            **checksums(self._directory, present),
        }

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """See `PromptEncoder.encode`: `prompt_embeds` [B, 77 + T5's, width], `pooled` [B, P]."""
        # As the pipeline does, both by the first tokenizer's length.
        length = self._clip[0][1].model_max_length
        states, pooled = [], []
        for model, tokenizer in self._clip:
            tokens = _tokens(tokenizer, prompts, length)
            output = model(tokens.to(self._device), output_hidden_states=True)
            states.append(output.hidden_states[-2])
            pooled.append(output[0])
        clip = torch.cat(states, dim=-1)
        clip = torch.nn.functional.pad(clip, (0, self.width - clip.shape[-1]))
        return {
            "prompt_embeds": torch.cat([clip, self._by_t5(prompts)], dim=-2).cpu(),
            "pooled": torch.cat(pooled, dim=-1).cpu(),
        }

    def count_cut(self, prompts: Sequence[str]) -> int:
        """See `PromptEncoder.count_cut`: by T5 where there is one; CLIP sees 77 tokens at most."""
        if self._t5 is not None:
            return count_longer(self._t5[1], prompts, self._length)
        tokenizer = self._clip[0][1]
        return count_longer(tokenizer, prompts, tokenizer.model_max_length)

    def _by_t5(self, prompts: Sequence[str]) -> Tensor:
        if self._t5 is None:
            shape = (len(prompts), self._length, self.width)
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        model, tokenizer = self._t5
        return cast(Tensor, model(_tokens(tokenizer, prompts, self._length).to(self._device))[0])


def _encoder(kind: Any, directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    return load_component(kind, directory, dtype=dtype).to(device).eval().requires_grad_(False)


def _tokens(tokenizer: Any, prompts: Sequence[str], length: int) -> Tensor:
    """Token ids of prompts, cut or padded to a length: int64 [B, length]."""
    found = tokenizer(
        list(prompts),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    )
    return cast(Tensor, found.input_ids)


def _parts(samples: Tensor, scale: int = 1) -> tuple[Tensor, ...]:
    """Few enough at a time; `scale`: pixels of an image along one of a sample."""
    height, width = samples.shape[-2:]
    return torch.split(samples, images_at_once(height * width * scale**2))


def images_at_once(pixels: int) -> int:
    """How many images of so many pixels are encoded or decoded together."""
    return max(1, PIXELS_AT_ONCE // pixels)


def empty_decoder(directory: Path, shape: tuple[int, ...]) -> Decoder:
    """A pipeline's decoder without memory; the published one where the pipeline is not here.

    Args:
        directory: of the pipeline, or its name on a hub.
        shape: of a latent.
    """
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    file, config = directory / "vae" / "config.json", AUTOENCODER
    if file.is_file():
        config = read_config(file, "AutoencoderKL")
    with torch.device("meta"):
        network = AutoencoderKL.from_config(config).eval()
    count = images_at_once(shape[-1] * shape[-2] * DOWNSCALE**2)
    latents = torch.zeros(count, *shape, device="meta")
    return Decoder(network, lambda: network.decode(latents))


@final
class SD3Autoencoder(Autoencoder):
    """A pipeline's `AutoencoderKL`, shifted and scaled as its networks want latents."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load it.

        Args:
            directory: of the pipeline.
            device: to work on.
            dtype: to load and work in.

        Raises:
            UserError: where it is missing or damaged.
        """
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        self._directory, self._device, self._dtype = directory, device, dtype
        loaded = load_component(AutoencoderKL, directory / "vae", torch_dtype=dtype)
        self._network = loaded.to(device).eval().requires_grad_(False)
        self._scale = float(loaded.config.scaling_factor)
        self._shift = float(loaded.config.shift_factor or 0.0)

    @cached_property
    def identity(self) -> dict[str, str]:  # type: ignore[override]
        """See `Autoencoder`."""
        return {
            "class": type(self).__name__,
            "dtype": str(self._dtype).removeprefix("torch."),
            **checksums(self._directory, ("vae",)),
        }

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """See `Autoencoder.encode`: the mode of the posterior, shifted and scaled."""
        parts = [
            self._network.encode(part.to(self._device, self._dtype)).latent_dist.mode()
            for part in _parts(images)
        ]
        return ((torch.cat(parts) - self._shift) * self._scale).to("cpu", images.dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See `Autoencoder.decode`; values may leave [-1, 1] a little."""
        parts = [
            self._network.decode(part / self._scale + self._shift, return_dict=False)[0]
            for part in _parts(latents.to(self._device, self._dtype), DOWNSCALE)
        ]
        return torch.cat(parts).to(latents.device, latents.dtype)
