"""One text encoder of transformers, for small networks that come without encoders of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.components import checksums, load_component
from fewstep.models.encoders import PromptEncoder

PACKAGE = "package:"


@final
class TextEncoder(PromptEncoder):
    """The last hidden states of an encoder, zero where a prompt has no token, and their mean.

    Attributes:
        width: of a token's encoding.
        pooled: width of a prompt's pooled encoding: the same.
    """

    def __init__(
        self, where: str, max_sequence_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Load an encoder.

        Args:
            where: a directory, or `package:NAME`; see `encoder_directory`.
            max_sequence_length: tokens of a prompt; longer ones are cut, shorter ones padded.
            device: to encode on.
            dtype: to load and encode in.

        Raises:
            UserError: where there is none, it is damaged, or it cannot take prompts so long.
        """
        import transformers
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        self._directory = encoder_directory(where)
        self._length, self._device, self._dtype = max_sequence_length, device, dtype
        self._tokenizer = load_component(AutoTokenizer, self._directory)
        written_by = (load_component(AutoConfig, self._directory).architectures or [""])[0]
        # T5's encoder alone has a class of its own; AutoModel would invent a decoder.
        kind = (
            getattr(transformers, written_by) if written_by.endswith("EncoderModel") else AutoModel
        )
        model, found = load_component(kind, self._directory, dtype=dtype, output_loading_info=True)
        missing = sorted(key for key in found["missing_keys"] if "pooler" not in key)
        if missing:
            raise UserError(
                f"model.text_encoder: {self._directory} has no weights for {missing[0]}, and "
                f"{len(missing) - 1} more; it was not written by a {type(model).__name__}"
            )
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        self._network = model.to(device).eval().requires_grad_(False)
        most = getattr(model.config, "max_position_embeddings", max_sequence_length)
        if max_sequence_length > most:
            raise UserError(
                f"model.max_sequence_length: {max_sequence_length} is given, but "
                f"{self._directory} takes {most} tokens at most"
            )
        if self._tokenizer.pad_token_id is None:
            raise UserError(f"model.text_encoder: {self._directory} has no token to pad with")
        self.width = self.pooled = int(model.config.hidden_size)

    @cached_property
    def identity(self) -> dict[str, str]:  # type: ignore[override]
        """See `PromptEncoder`."""
        return {
            "class": type(self).__name__,
            "max_sequence_length": str(self._length),
            "dtype": str(self._dtype).removeprefix("torch."),
            **checksums(self._directory, (".",)),
        }

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """See `PromptEncoder.encode`: `prompt_embeds` [B, L, width], `pooled` [B, width]."""
        tokens = self._tokenizer(
            list(prompts),
            padding="max_length",
            max_length=self._length,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        mask = tokens.attention_mask
        output = self._network(input_ids=tokens.input_ids, attention_mask=mask)
        embeds, pooled = mask_and_pool(output.last_hidden_state, mask)
        return {"prompt_embeds": embeds.cpu(), "pooled": pooled.cpu()}

    def count_cut(self, prompts: Sequence[str]) -> int:
        """See `PromptEncoder.count_cut`."""
        return count_longer(self._tokenizer, prompts, self._length)


def count_longer(tokenizer: Any, prompts: Sequence[str], length: int) -> int:
    """How many prompts have more tokens than `length`."""
    return sum(len(ids) > length for ids in tokenizer(list(prompts), verbose=False).input_ids)


def mask_and_pool(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states with zeros at the padding, and the mean of the others.

    Args:
        states: [B, L, D].
        mask: [B, L], one for tokens and zero for padding.

    Returns:
        [B, L, D], and [B, D]: zero for a prompt without a token.
    """
    weight = mask[..., None].to(states.dtype)
    masked = states * weight
    return masked, masked.sum(1) / weight.sum(1).clamp(min=1)


def encoder_directory(where: str) -> Path:
    """The directory of a transformers model.

    Args:
        where: the directory itself; or `package:NAME`, the name of an installed package which
            has one in it. The package is not imported.

    Raises:
        UserError: where there is none, or more than one.
    """
    if not where.startswith(PACKAGE):
        directory = Path(where)
        if not (directory / "config.json").is_file():
            raise UserError(
                f"model.text_encoder: {where} is no directory with a transformers model (there is "
                f"no config.json); give one, or package:NAME"
            )
        return directory
    name = where.removeprefix(PACKAGE)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UserError(
            f"model.text_encoder: there is no package {name!r} installed; its name is that which "
            f"Python imports, with underscores"
        )
    found = sorted(
        file.parent
        for file in Path(spec.origin).parent.rglob("config.json")
        if any(file.parent.glob("*.safetensors"))
    )
    if len(found) != 1:
        raise UserError(
            f"model.text_encoder: the package {name} has {len(found)} transformers models in it "
            f"(config.json with .safetensors); it must have one"
        )
    return found[0]
