"""Writing samples to files."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from fewstep.errors import UserError
from fewstep.files import check_place, permit_as_usual, saving


def check_out(out: Path) -> None:
    """Raise UserError for a name that `write_samples` cannot write to, before samples are made."""
    if out.suffix not in (".png", ".safetensors", ""):
        raise UserError(f"--out {out}: end it in .png, .safetensors, or name a directory")
    if out.suffix and out.is_dir():
        raise UserError(f"--out {out}: is a directory; name a file in it, as in {out / 'x.png'}")
    if out.is_symlink() and not out.exists():
        raise UserError(f"--out {out}: is a link to nothing")
    if not out.suffix and out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out}: is not empty; name a new folder, or a picture (.png)")
    check_place(out.parent if out.suffix else out, "--out")


def write_samples(samples: Tensor, out: Path) -> str:
    """Write samples, in the form that the name asks for; returns what was written.

    Args:
        samples: [N, C, H, W] in [-1, 1] with 1 or 3 channels for pictures; any shape for tensors.
        out: `name.png` (one picture, a grid), `name.safetensors` (the tensor `samples`), or a
            new or empty directory (a picture each).

    Raises:
        UserError: for another ending, samples that are no images or not finite, or a place that
            cannot be written.
    """
    check_out(out)
    if out.suffix != ".safetensors" and (samples.ndim != 4 or samples.shape[1] not in (1, 3)):
        raise UserError(f"--out {out}: the samples are no images; end it in .safetensors")
    if not torch.isfinite(samples).all():
        raise UserError(f"--out {out}: the samples are not finite; nothing was written")
    with saving(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".safetensors":
            save_file({"samples": samples.contiguous()}, out)
            permit_as_usual([out])
            return f"{len(samples)} samples in {out}"
        if out.suffix == ".png":
            to_picture(tile(samples)).save(out)
            return f"{len(samples)} images in the grid {out}"
        out.mkdir(exist_ok=True)
        for index, sample in enumerate(samples):
            to_picture(sample).save(out / f"{index:05d}.png")
        return f"{len(samples)} images in {out}/"


def tile(samples: Tensor, gap: int = 1) -> Tensor:
    """Images [N, C, H, W] in rows as one image [C, rows * H + gaps, columns * W + gaps]."""
    columns = math.ceil(math.sqrt(len(samples))) if len(samples) > 10 else len(samples)
    rows = math.ceil(len(samples) / columns)
    count, channels, height, width = samples.shape
    grid = samples.new_full(
        (channels, rows * (height + gap) - gap, columns * (width + gap) - gap), 1
    )
    for index in range(count):
        top, left = (index // columns) * (height + gap), (index % columns) * (width + gap)
        grid[:, top : top + height, left : left + width] = samples[index]
    return grid


def to_picture(image: Tensor, least_side: int = 64) -> Image.Image:
    """An image [C, H, W] in [-1, 1] as a picture; small ones are enlarged without smoothing."""
    scale = max(1, math.ceil(least_side / min(image.shape[1:])))
    pixels = ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).squeeze(-1).numpy()
    picture = Image.fromarray(array)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
