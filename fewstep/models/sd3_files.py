"""What a Stable Diffusion 3 pipeline's directory says of itself, and whether its parts fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fewstep.errors import UserError
from fewstep.models.files import read_config

SCHEDULER = Path("scheduler") / "scheduler_config.json"
# Pixels of an image for each entry of a latent, along each side.
DOWNSCALE = 8
# vae/config.json of Stable Diffusion 3 and 3.5, all of which have the same: 83,819,683 parameters.
AUTOENCODER: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def transformer_directory(directory: Path) -> Path:
    """Where the network of a pipeline is; the directory itself if it is no pipeline."""
    inside = directory / "transformer"
    return inside if (inside / "config.json").is_file() else directory


def check_pipeline(directory: Path, in_channels: int) -> None:
    """Raise UserError unless a pipeline's other parts fit a network.

    Args:
        directory: with vae/ and scheduler/, as diffusers writes them.
        in_channels: of the samples that the network takes.
    """
    vae = read_config(directory / "vae" / "config.json", "AutoencoderKL")
    channels = vae.get("latent_channels", 4)
    if channels != in_channels:
        raise UserError(
            f"{directory}/vae makes latents of {channels} channels, the network takes "
            f"{in_channels}: they do not belong together"
        )
    scale = 2 ** (len(vae.get("block_out_channels", (64,))) - 1)
    if scale != DOWNSCALE:
        raise UserError(
            f"{directory}/vae makes a latent of {scale} by {scale} pixels; {DOWNSCALE} by "
            f"{DOWNSCALE} are supported"
        )
    read_scheduler_config(directory)


def read_scheduler_config(directory: Path) -> dict[str, Any]:
    """A pipeline's schedule, as its scheduler's configuration has it.

    Raises:
        UserError: where there is none, or it is for networks that do not predict velocity.
    """
    config = read_config(directory / SCHEDULER)
    name, kind = config.get("_class_name"), config.get("prediction_type", "flow_prediction")
    if not str(name).startswith("FlowMatch") or kind != "flow_prediction":
        raise UserError(
            f"{directory}/scheduler is a {name} (prediction_type {kind!r}): its network does not "
            f"predict velocity on a rectified flow, as those of Stable Diffusion 3 do"
        )
    return config


def shift_of(config: dict[str, Any], tokens: int) -> float:
    """The shift s of a flow-matching scheduler's sigmas: s t / (1 + (s - 1) t).

    A dynamic one (arXiv 2403.03206, section 5.3.2) depends on the number of tokens: diffusers
    interpolates mu linearly between two of them, and s is exp(mu), or mu itself.

    Args:
        config: of the scheduler.
        tokens: of an image.
    """
    if not config.get("use_dynamic_shifting", False):
        return float(config.get("shift", 1.0))
    least, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    mu = low + (high - low) * (tokens - least) / (most - least)
    exponential = config.get("time_shift_type", "exponential") == "exponential"
    return math.exp(mu) if exponential else float(mu)
