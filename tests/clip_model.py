"""A tiny CLIP model with random weights, as transformers writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer


def write_tiny_clip(directory: Path) -> Path:
    """Write model and processor, for images of 32 by 32, and return the directory."""
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[])
    tokenizer.model_max_length = 20
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    text = {
        **small,
        "vocab_size": len(words),
        "num_attention_heads": 2,
        "max_position_embeddings": 20,
        "bos_token_id": len(words) - 2,
        "eos_token_id": len(words) - 1,
    }
    vision = {**small, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=4))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)  # as made, all images look alike to it
    model.save_pretrained(directory)
    images = CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_resize=False
    )
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(directory)
    return directory
