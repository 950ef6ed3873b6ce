"""Images with captions: where they are, and an image as a tensor."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fewstep.data.shards import IMAGE_ENDINGS, read_shard
from fewstep.data.sources import Blob, Record, record
from fewstep.data.tables import COLUMN, no_column, read_csv, read_jsonl, read_text
from fewstep.errors import UserError

Color = tuple[int, int, int]
STRIP = 8
"""How many times as long as what is kept of it a picture may be when it is resized."""
METADATA = ("metadata.jsonl", "metadata.csv")


def read_images(names: Sequence[str], column: str | None) -> list[Record]:
    """All records of some folders and shards, in their order; no image is decoded yet.

    Args:
        names: as `expand` has found them.
        column: of the caption in a folder's metadata, or in the .json of samples in shards;
            None: "text" there, and the .txt beside each image.

    Raises:
        UserError: for a source of another kind, without any image, or that cannot be read.
    """
    found: list[Record] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            records = list(read_folder(path, column))
        elif path.suffix.lower() == ".tar":
            records = list(read_shard(path, column, images=True))
        else:
            raise UserError(f"data.files: {name} is neither a folder of images nor a .tar")
        if not records:
            raise UserError(f"data.files: {name} is empty: there is no image in it")
        found += records
    return found


def read_folder(folder: Path, column: str | None) -> Iterator[Record]:
    """The images of a folder and of the folders in it, by name.

    Captions are in `metadata.jsonl` or `metadata.csv` (`file_name` and a column of text), or in a
    .txt of the image's name.
    """
    files = [Path(top) / name for top, _, names in os.walk(folder) for name in names]
    images = sorted(
        (file.relative_to(folder).as_posix(), file)
        for file in files
        if file.suffix.lower().lstrip(".") in IMAGE_ENDINGS and not file.name.startswith(".")
    )
    metadata = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(metadata) > 1:
        raise UserError(f"{folder} has {' and '.join(METADATA)}; which one counts?")
    if metadata:
        yield from _with_metadata(dict(images), metadata[0], column or COLUMN)
        return
    if column is not None:
        raise UserError(
            f"data.column: {column!r} is given, but {folder} has neither {' nor '.join(METADATA)}"
        )
    for _, file in images:
        caption = file.with_suffix(".txt")
        if caption.is_file():
            yield record(str(file), read_text(caption), Blob(file))
        else:
            yield Record(str(file), problem=f"there is no {caption.name}", image=Blob(file))


def _with_metadata(images: dict[str, Path], metadata: Path, column: str) -> Iterator[Record]:
    rows = list(read_jsonl(metadata) if metadata.suffix == ".jsonl" else read_csv(metadata))
    valid = [row for _, row in rows if isinstance(row, dict)]
    names = dict.fromkeys(key for row in valid for key in row)
    for needed in ("file_name", column):
        if valid and needed not in names:
            raise no_column(metadata, needed, names)
    left = dict(images)
    for place, row in rows:
        if isinstance(row, str):
            yield Record(place, problem=row)
            continue
        name: Any = row.get("file_name")
        file = left.pop(name, None) if isinstance(name, str) else None
        if file is not None:
            yield record(str(file), row.get(column), Blob(file))
        elif name in images:
            yield Record(place, problem=f"{name} is listed twice")
        else:
            yield Record(place, problem=f"there is no image {name!r}")
    for file in left.values():
        yield Record(str(file), problem=f"it is not in {metadata.name}", image=Blob(file))


def decode_image(content: bytes, height: int, width: int, background: Color, mode: str) -> Tensor:
    """An encoded image as a tensor: turned upright, resized to cover the size, cut at the centre.

    Args:
        content: of an image file; of an animated one the first picture.
        height: of the result.
        width: of the result.
        background: red, green and blue, 0 to 255: what is behind transparent images.
        mode: "RGB", or "L" for one channel.

    Returns:
        float32 [C, height, width] in [-1, 1].

    Raises:
        ValueError: in words, where it cannot be decoded.
    """
    try:
        with Image.open(io.BytesIO(content)) as opened:
            picture = ImageOps.exif_transpose(opened)
            picture = flatten(picture, background).convert(mode)
            pixels = np.array(fit(picture, height, width), dtype=np.float32)
    except UnidentifiedImageError as error:
        raise ValueError("the image cannot be read: it is of no kind that Pillow knows") from error
    except MemoryError as error:
        raise ValueError("the image cannot be read: it is too large for the memory") from error
    # Pillow's decoders raise whatever goes wrong in them.
    except Exception as error:
        raise ValueError(f"the image cannot be read: {error}") from error
    return torch.from_numpy(pixels.reshape(height, width, -1)).permute(2, 0, 1) / 127.5 - 1


def fit(picture: Image.Image, height: int, width: int) -> Image.Image:
    """A picture resized to cover a size, and cut at its centre."""
    # A strip of one pixel's height would become huge: most of what is cut off is cut off before.
    most = (
        middle(picture.width, math.ceil(STRIP * picture.height * width / height)),
        middle(picture.height, math.ceil(STRIP * picture.width * height / width)),
    )
    picture = centre(picture, *most)
    scale = max(height / picture.height, width / picture.width)
    size = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.LANCZOS)  # antialiased
    return centre(picture, width, height)


def middle(length: int, most: int) -> int:
    """What to keep of a length, about `most`, so that as much is cut off on either side."""
    return length if length <= most else most + (length - most) % 2


def centre(picture: Image.Image, width: int, height: int) -> Image.Image:
    """The middle of a picture, in pixels."""
    if picture.size == (width, height):
        return picture
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


def flatten(picture: Image.Image, background: Color) -> Image.Image:
    """A picture in eight bits without transparency, composed on a colour."""
    if picture.mode in ("I", "F"):
        kind = "floating-point numbers" if picture.mode == "F" else "integers of 32 bits"
        raise ValueError(f"pixels are {kind}, whose range is not known")
    if picture.mode.startswith("I;16"):  # which Pillow would cut off at 255
        values = np.asarray(picture, dtype=np.float64)
        grey = Image.fromarray((values / 257).round().astype(np.uint8)).convert("RGB")
        if (see_through := picture.info.get("transparency")) is not None:
            hidden = Image.fromarray(values == see_through)
            grey.paste(background, mask=hidden)
        return grey
    if picture.has_transparency_data:
        above = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", above.size, (*background, 255)), above)
    return picture.convert("RGB")
