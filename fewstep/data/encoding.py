"""Encode prompts and images once, a shard at a time, so that a stop at any moment costs little."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from fewstep.data.encoded import CONDITION, METADATA, ROWS, SAMPLES
from fewstep.data.images import Color, decode_image
from fewstep.data.manifest import ShardEntry
from fewstep.data.sources import Record
from fewstep.errors import UserError
from fewstep.files import describe_file, permit_as_usual, saving, sync_directory, sync_file
from fewstep.models.encoders import Autoencoder, PromptEncoder

THREADS = 8
"""That decode images."""

T = TypeVar("T")
OnItems = Callable[[float], None]
"""Told how many items of a shard are done; one whose image alone is done counts half."""


@final
@dataclass(frozen=True)
class Encoder:
    """All that turns records into shards.

    Attributes:
        prompts: encodes them.
        autoencoder: encodes images; None: they stay as they are.
        picture: height, width and mode of images as `decode_image` takes them; None: there are no
            images.
        background: behind transparent images.
        sample_shape: what encoded images must have.
        dtype: in which conditions are stored, where they are floating-point numbers.
        batch_size: of prompts, and of images.
    """

    prompts: PromptEncoder
    autoencoder: Autoencoder | None
    picture: tuple[int, int, str] | None
    background: Color
    sample_shape: tuple[int, ...]
    dtype: torch.dtype
    batch_size: int

    def condition(
        self, prompts: Sequence[str], on_prompts: Callable[[int], None] = lambda done: None
    ) -> dict[str, Tensor]:
        """Conditions of prompts as they are stored, each entry [B, ...].

        Args:
            prompts: any number.
            on_prompts: told how many are done.

        Raises:
            UserError: where one is not finite in that dtype.
        """
        parts, done = [], 0
        for batch in batches(prompts, self.batch_size):
            parts.append(self._condition(batch))
            on_prompts(done := done + len(batch))
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _condition(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        found = {}
        for key, value in self.prompts.encode(prompts).items():
            if len(value) != len(prompts):
                raise UserError(
                    f"model: the prompt encoder gives {len(value)} rows of {key!r} for "
                    f"{len(prompts)} prompts"
                )
            stored = value.to("cpu", self.dtype) if value.is_floating_point() else value.cpu()
            wrong = ~torch.isfinite(stored).reshape(len(stored), -1).all(1)
            if wrong.any():
                first = prompts[int(wrong.nonzero()[0])]
                raise UserError(
                    f"data.dtype: {key!r} of the prompt {first!r} is not finite in "
                    f"{str(self.dtype).removeprefix('torch.')}"
                )
            found[key] = stored
        return found

    def latents(self, images: Sequence[Tensor]) -> Tensor:
        """What networks see of images [C, H, W]: float32 [B, *sample_shape].

        Raises:
            UserError: where that has another shape, or is not finite.
        """
        stacked = torch.stack(list(images))
        if self.autoencoder is not None:
            stacked = self.autoencoder.encode(stacked).to("cpu", torch.float32)
        if tuple(stacked.shape[1:]) != self.sample_shape:
            raise UserError(
                f"data.image_size: images of {images[0].shape[1]} x {images[0].shape[2]} pixels "
                f"become samples of shape {tuple(stacked.shape[1:])}; the network takes "
                f"{self.sample_shape}"
            )
        if not torch.isfinite(stacked).all():
            raise UserError("model: the autoencoder gives values that are not finite")
        return stacked


def batches(things: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """So many of them at a time."""
    for start in range(0, len(things), size):
        yield things[start : start + size]


def write_shard(
    directory: Path, name: str, records: Sequence[Record], encoder: Encoder, on_items: OnItems
) -> ShardEntry:
    """Encode some records and write them as one file; it is there as a whole or not at all.

    The bytes depend on the records and the encoder alone: equal prompts are encoded and stored
    once, and batches begin anew in each shard.

    Args:
        directory: of the data set.
        name: of the file.
        records: of the shard.
        encoder: what to do with them.
        on_items: told how far it is.

    Raises:
        UserError: where the encoders give what cannot be used.
    """
    texts, samples, skipped = encode_images(records, encoder, on_items)
    if not texts:
        return {"size": 0, "sha256": "", "items": 0, "skipped": skipped, "cut": 0}
    unique = list(dict.fromkeys(texts))
    number = {text: row for row, text in enumerate(unique)}
    by_image = 0.5 if samples is not None else 0.0

    def on_prompts(done: int) -> None:
        on_items(len(records) * (by_image + (1 - by_image) * done / len(unique)))

    condition = encoder.condition(unique, on_prompts)
    tensors = {CONDITION + key: value for key, value in condition.items()}
    tensors[ROWS] = torch.tensor([number[text] for text in texts])
    if samples is not None:
        tensors[SAMPLES] = samples
    write_tensors(directory, name, tensors, {"prompts": unique})
    entry = describe_file(directory / name)
    cut = encoder.prompts.count_cut(texts)
    return {**entry, "items": len(texts), "skipped": skipped, "cut": cut}


def encode_images(
    records: Sequence[Record], encoder: Encoder, on_items: OnItems
) -> tuple[list[str], Tensor | None, list[list[str]]]:
    """Prompts and samples of the records that can be used, and what is wrong with the others."""
    texts: list[str] = []
    samples: list[Tensor] = []
    skipped: list[list[str]] = []
    looked = 0
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for batch in batches(records, encoder.batch_size):
            found = list(pool.map(lambda each: look(each, encoder), batch))
            images = [image for image in found if isinstance(image, Tensor)]
            if images:
                samples.append(encoder.latents(images))
            for each, result in zip(batch, found, strict=True):
                if isinstance(result, str):
                    skipped.append([each.where, result])
                else:
                    texts.append(each.text or "")
            looked += len(batch)
            if encoder.picture is not None:
                on_items(looked / 2)
    return texts, torch.cat(samples) if samples else None, skipped


def look(each: Record, encoder: Encoder) -> Tensor | str | None:
    """The image of a record [C, H, W], None where it has none, or what is wrong with it."""
    fault = each.fault()
    if fault is not None or encoder.picture is None:
        return fault
    assert each.image is not None
    height, width, mode = encoder.picture
    try:
        return decode_image(each.image.read(), height, width, encoder.background, mode)
    except MemoryError:
        return "the image cannot be read: it is too large for the memory"
    except (OSError, ValueError) as error:
        return str(error)


def write_tensors(
    directory: Path, name: str, tensors: Mapping[str, Tensor], metadata: object = None
) -> None:
    """Write a safetensors file: it is there as a whole or not at all, with the same bytes always.

    Several entries of metadata would be written in an order that is not the same every time: there
    is one.
    """
    temporary = directory / f".{name}.tmp"
    plain = {key: value.contiguous() for key, value in tensors.items()}
    text = {METADATA: json.dumps(metadata, ensure_ascii=False)} if metadata is not None else None
    with saving(directory / name, lambda: temporary.unlink(missing_ok=True)):
        save_file(plain, temporary, text)
        permit_as_usual([temporary])
        sync_file(temporary)
        temporary.replace(directory / name)
        sync_directory(directory)
