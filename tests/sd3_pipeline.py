"""A tiny but whole Stable Diffusion 3 pipeline with random weights, as diffusers writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

# As 3.5 is: attention over the image alone in some blocks, normalized queries and keys.
TINY_SD3: Mapping[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 20,
    "out_channels": 4,
    "pos_embed_max_size": 6,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
RESOLUTION = 64  # pixels: eight times the sample size
TINY_VAE: Mapping[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (4, 4, 8, 8),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "sample_size": RESOLUTION,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIP_LENGTH = 77
MERGES = ["a t</w>", "c at</w>", "r e", "re d</w>", "t h", "th e</w>"]
WORDS = ("▁a", "▁the", "▁red", "▁cat", "▁on", "▁house", "s", "ing")


def clip_tokenizer() -> CLIPTokenizer:
    """Bytes, a few merges, and the special tokens last, as in CLIP's own vocabulary."""
    letters = sorted(ByteLevel.alphabet())
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*letters, *(f"{c}</w>" for c in letters), *merged, "<|startoftext|>", "<|endoftext|>"]
    merges = [tuple(merge.split()) for merge in MERGES]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        model_max_length=CLIP_LENGTH,
    )


def t5_tokenizer() -> T5TokenizerFast:
    """Letters and a few words by a unigram model; no sentencepiece needed."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", *"0123456789.,!?'-"]
    vocabulary = [*special, *((w, -2.0) for w in WORDS), *((p, -4.0) for p in pieces)]
    vocabulary += [(f"<extra_id_{index}>", 0.0) for index in range(2)]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=2, model_max_length=512)


def clip_encoder(tokenizer: CLIPTokenizer, hidden: int, layers: int) -> CLIPTextModelWithProjection:
    """A CLIP text encoder as wide as its projection."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            projection_dim=hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=CLIP_LENGTH,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def t5_encoder(vocabulary: int) -> T5EncoderModel:
    """An encoder of two layers, as wide as what the transformer attends to."""
    return T5EncoderModel(
        T5Config(
            vocab_size=vocabulary,
            d_model=32,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


def tiny_pipeline(
    *,
    t5: bool = True,
    transformer: Mapping[str, Any] | None = None,
    vae: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> StableDiffusion3Pipeline:
    """The pipeline in memory; the same for the same arguments.

    Args:
        t5: whether it has the third text encoder; without, the stock class loads what was saved
            by `from_pretrained(directory, text_encoder_3=None, tokenizer_3=None)`.
        transformer: changes of `TINY_SD3`.
        vae: changes of the autoencoder's configuration.
        scheduler: the scheduler's configuration; by default shift 3.
        seed: of the weights.
    """
    first, second, third = clip_tokenizer(), clip_tokenizer(), t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(**{**TINY_SD3, **(transformer or {})}).eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler or {"shift": 3.0})),
            vae=AutoencoderKL(**{**TINY_VAE, **(vae or {})}).eval(),
            text_encoder=clip_encoder(first, 8, 2).eval(),
            tokenizer=first,
            text_encoder_2=clip_encoder(second, 12, 3).eval(),
            tokenizer_2=second,
            text_encoder_3=t5_encoder(len(third)).eval() if t5 else None,
            tokenizer_3=third if t5 else None,
        )


def write_tiny_pipeline(
    directory: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write the pipeline as `save_pretrained` does, and return the directory.

    Args:
        directory: to write.
        dtype: of all weights.
        changes: see `tiny_pipeline`.
    """
    pipeline = tiny_pipeline(**changes)
    if dtype != torch.float32:
        pipeline.to(dtype=dtype)
    pipeline.save_pretrained(directory)
    return directory
