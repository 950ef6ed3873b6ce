"""What it takes to make images of latents, counted without making any."""

from __future__ import annotations

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from fewstep.models.encoders import Decoder


def weight_bytes(decoder: Decoder) -> int:
    """Of the autoencoder that validation loads, in float32."""
    return sum(tensor.nbytes for tensor in decoder.network.parameters())


def image_bytes(decoder: Decoder) -> int:
    """The most that decoding has in memory at once, beside the weights: an estimate."""
    tracker = MemTracker()
    tracker.track_external(decoder.network)
    with torch.no_grad(), tracker:
        decoder.decode()
    (of_device,) = tracker.get_tracker_snapshot("peak").values()
    return int(of_device["Total"]) - weight_bytes(decoder)
