"""Make an encoded data set, or the rest of one: on any number of ranks, with the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch

from fewstep.data.dataset import Split
from fewstep.data.directory import Encoded, Shards, begin, finish, look_at, nothing_left
from fewstep.data.encoding import Encoder, write_shard
from fewstep.data.manifest import VERSION, Plan, ShardEntry, publish, shard_name, sidecar
from fewstep.data.settings import ImageData, TextToImageData, check_skipped
from fewstep.data.sources import Record
from fewstep.errors import UserError
from fewstep.models.encoders import Autoencoder
from fewstep.models.model import Model
from fewstep.parallel.ranks import Ranks

OnProgress = Callable[[float, int], None]
"""Told how many items are done, and how many there are."""

PROBE_PIXELS = 64


def encode_data(
    settings: TextToImageData,
    model: Model,
    dtype: torch.dtype,
    text_dtype: torch.dtype,
    ranks: Ranks,
    *,
    overwrite: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Encoded:
    """Encode what is not encoded yet.

    Args:
        settings: what, and where it is written.
        model: its prompt encoder and autoencoder are used.
        dtype: in which the autoencoder computes.
        text_dtype: in which the prompt encoder computes.
        ranks: that share the work, each with a device of its own.
        overwrite: throw away encoded data that are there, whatever they were made from.
        on_progress: told how far all of them are, on the first rank.

    Raises:
        UserError: where sources or encoders cannot be used, or the directory holds something else.
    """
    shards = read_shards(settings)
    check_agreement(shards, ranks)
    directory = settings.directory
    stamps = ranks.tell(lambda: look_at(settings, model.encoding(), overwrite))
    encoder, identities = load_encoder(settings, model, dtype, text_dtype, ranks.device)
    plan: Plan = {
        "version": VERSION,
        "data": settings.facts(),
        "computed": {
            "dtype": str(dtype),
            "text_dtype": str(text_dtype),
            "shard_items": settings.shard_items,
            "picture": list(encoder.picture) if encoder.picture is not None else None,
            "records": {name: len(records) for name, records in shards.items()},
        },
        **identities,
        **stamps,
    }
    finished = ranks.tell(lambda: begin(directory, plan, shards, encoder, overwrite))
    missing = [name for name in shards if name not in finished]
    progress = Progress(directory, shards, finished, on_progress)
    for name in missing[ranks.rank :: ranks.size]:
        entry = write_shard(directory, name, shards[name], encoder, progress.within)
        check_skipped(settings, entry["skipped"])
        publish(directory, sidecar(name), entry)
        progress.count()
    ranks.barrier()  # every shard is there now
    progress.count()
    return ranks.tell(lambda: finish(settings, plan, shards, finished, len(missing)))


def read_shards(settings: TextToImageData) -> Shards:
    """All records, cut into shards by file name: those of training first.

    Raises:
        UserError: where they cannot be read or used, as far as that is known without looking at
            images, or where all would be held out.
    """
    found: dict[Split, list[Record]] = {
        split: settings.read(names) for split, names in settings.sources().items()
    }
    if held := settings.validation_items:
        train = found["train"]
        if held >= len(train):
            raise UserError(
                f"data.validation_items: {held} of {len(train)} items are held out; some must be "
                f"left to learn from"
            )
        found = {"train": train[:-held], "validation": train[-held:]}
    faults = {
        split: [[each.where, fault] for each in records if (fault := each.fault()) is not None]
        for split, records in found.items()
    }
    check_skipped(settings, [each for split in found for each in faults[split]])
    for split, records in found.items():
        if len(faults[split]) == len(records):
            raise nothing_left(split, faults[split])
    size = settings.shard_items
    return {
        shard_name(split, start // size): records[start : start + size]
        for split, records in found.items()
        for start in range(0, len(records), size)
    }


def check_agreement(shards: Shards, ranks: Ranks) -> None:
    """Raise UserError where the ranks do not find the same records."""
    content = hashlib.sha256(
        repr([(n, r.where, r.text) for n in shards for r in shards[n]]).encode()
    )
    if ranks.any(ranks.tell(content.hexdigest) != content.hexdigest()):
        raise UserError("data.files: not every rank finds the same items; is a disk not shared?")


def load_encoder(
    settings: TextToImageData,
    model: Model,
    dtype: torch.dtype,
    text_dtype: torch.dtype,
    device: torch.device,
) -> tuple[Encoder, dict[str, Any]]:
    """The encoders, and what they say they are, as sections of a plan."""
    prompts = model.prompt_encoder(device, text_dtype)
    shape = tuple(model.sample_shape)
    autoencoder, picture, background = None, None, (255, 255, 255)
    if isinstance(settings, ImageData):
        autoencoder = model.autoencoder(device, dtype)
        picture = (*image_size(settings, shape, autoencoder), image_mode(shape, autoencoder))
        background = settings.background
    stored = getattr(torch, settings.dtype)
    encoder = Encoder(prompts, autoencoder, picture, background, shape, stored, settings.batch_size)
    return encoder, {
        "encoder": dict(prompts.identity),
        "autoencoder": dict(autoencoder.identity) if autoencoder is not None else {},
    }


def image_size(
    settings: ImageData, shape: tuple[int, ...], autoencoder: Autoencoder | None
) -> tuple[int, int]:
    """Height and width of images: those of the recipe, or what becomes a sample of this shape."""
    if settings.image_size is not None:
        return settings.image_size, settings.image_size
    if len(shape) != 3:
        raise UserError(f"data.name: 'images' is given; the network takes samples of shape {shape}")
    height, width = shape[1:]
    if autoencoder is None:
        return height, width
    probe = autoencoder.encode(torch.zeros(1, 3, PROBE_PIXELS, PROBE_PIXELS))
    return height * PROBE_PIXELS // probe.shape[2], width * PROBE_PIXELS // probe.shape[3]


def image_mode(shape: tuple[int, ...], autoencoder: Autoencoder | None) -> str:
    """Pillow's mode: grey where a network sees images of one channel itself."""
    return "L" if autoencoder is None and shape[0] == 1 else "RGB"


@final
class Progress:
    """How far all ranks are, as one of them sees it."""

    def __init__(
        self,
        directory: Path,
        shards: Shards,
        finished: Mapping[str, ShardEntry],
        on_progress: OnProgress,
    ) -> None:
        """Before anything is made now; `finished`: what was found."""
        self._directory, self._finished = directory, set(finished)
        self._sizes = {name: len(records) for name, records in shards.items()}
        self._on_progress = on_progress
        self._done = 0
        self.count()

    def count(self) -> None:
        """Count the items of finished shards, those of other ranks included."""
        self._finished |= {
            n
            for n in self._sizes.keys() - self._finished
            if (self._directory / sidecar(n)).exists()
        }
        self._done = sum(self._sizes[name] for name in self._finished)
        self.within(0)

    def within(self, items: float) -> None:
        """So many items of the next shard are done."""
        self._on_progress(self._done + items, sum(self._sizes.values()))
