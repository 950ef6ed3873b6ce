"""Make an encoded data set, or the rest of one: on any number of ranks, with the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open

from fewstep.data.encoded import CONDITION, SAMPLES
from fewstep.data.encoding import Encoder, write_shard, write_tensors
from fewstep.data.manifest import (
    MANIFEST,
    UNCONDITIONAL,
    UNFINISHED,
    VERSION,
    Plan,
    ShardEntry,
    Split,
    check_file,
    differences,
    publish,
    read_document,
    shard_name,
)
from fewstep.data.settings import ImageData, TextToImageData, check_skipped, stale
from fewstep.data.sources import Record, local, stamp_all
from fewstep.errors import UserError
from fewstep.files import describe_file, saving, sync_directory
from fewstep.models.encoders import Autoencoder, Encoding
from fewstep.models.model import Model
from fewstep.parallel.ranks import Ranks

OnProgress = Callable[[float, int], None]
"""Told how many items are done, and how many there are."""

Shards = dict[str, list[Record]]
PROBE_PIXELS = 64


@final
@dataclass(frozen=True)
class Encoded:
    """What has become of encoding a data set.

    Attributes:
        directory: where it is.
        items: how many there are, by split.
        skipped: the records that were left out, each with its place and what is wrong.
        made: how many shards were made now, by all ranks; none where all was there already.
        files: how many files there are.
        bytes: of all files.
    """

    directory: Path
    items: Mapping[str, int]
    skipped: list[list[str]]
    made: int
    files: int
    bytes: int


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
        overwrite: throw away what is there, whatever it was made from.
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
    finished = ranks.tell(lambda: begin(directory, plan, shards, encoder))
    missing = [name for name in shards if name not in finished]
    progress = Progress(directory, shards, finished, on_progress)
    for name in missing[ranks.rank :: ranks.size]:
        entry = write_shard(directory, name, shards[name], encoder, progress.within)
        check_skipped(settings, entry["skipped"])
        publish(directory, sidecar(name), entry)
        progress.count()
    ranks.barrier()  # every shard is there now
    return ranks.tell(lambda: finish(settings, plan, shards, finished, len(missing)))


def read_shards(settings: TextToImageData) -> Shards:
    """All records, cut into shards by file name: those of training first.

    Raises:
        UserError: where they cannot be read, or all would be held out.
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


def look_at(settings: TextToImageData, encoding: Encoding, overwrite: bool) -> dict[str, Any]:
    """Look at the directory and the sources before anything is loaded.

    Returns:
        Sections of a plan: `sources`, and the family's own `encoding`.

    Raises:
        UserError: where the directory holds something else.
    """
    directory = settings.directory
    if directory.exists() and not directory.is_dir():
        raise UserError(f"data.encoded: {directory} is a file; name a directory")
    if overwrite:
        clear(directory)
    plan = read_plan(directory)
    present = [p for p in directory.iterdir() if p.name != ".lock"] if directory.is_dir() else []
    if plan is None and present:
        raise UserError(
            f"data.encoded: {directory} holds something that is no encoded data; name another "
            f"directory"
        )
    known = plan or {"sources": {}, "encoding": {"files": {}}}
    names = [name for names in settings.sources().values() for name in names]
    stamps = {
        "sources": stamp_all(local(names), known["sources"]),
        "encoding": {
            "settings": dict(encoding.settings),
            "files": stamp_all(encoding.files, known["encoding"]["files"]),
        },
    }
    if plan is not None:
        old = {"data": plan["data"]} | {key: plan[key] for key in stamps}
        if found := differences(old, {"data": settings.facts(), **stamps}):
            raise stale(directory, found)
    return stamps


def read_plan(directory: Path) -> Plan | None:
    """What a directory's data are made from, be they complete or not; None where there are none."""
    for name in (MANIFEST, UNFINISHED):
        document = read_document(directory / name)
        if document is not None:
            plan: Plan = document["plan"]
            return plan
    return None


def clear(directory: Path) -> None:
    """Remove what encoding has written into a directory, and nothing else; the manifest first."""
    if not directory.is_dir():
        return
    patterns = (MANIFEST, UNFINISHED, "*-*.json", UNCONDITIONAL, "*-*.safetensors", ".*.tmp")
    if not any((directory / name).exists() for name in (MANIFEST, UNFINISHED)):
        return  # not ours
    with saving(directory):
        for pattern in patterns:
            for file in directory.glob(pattern):
                file.unlink()
        sync_directory(directory)


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


def begin(directory: Path, plan: Plan, shards: Shards, encoder: Encoder) -> dict[str, ShardEntry]:
    """Prepare the directory; the shards that are finished already, by name.

    Of data that are complete, those that are damaged or missing are made again.

    Raises:
        UserError: where what is there was made from something else.
    """
    with saving(directory):
        directory.mkdir(parents=True, exist_ok=True)
    old = read_plan(directory)
    if old is not None and (found := differences(old, plan)):
        raise stale(directory, found)
    manifest = read_document(directory / MANIFEST)
    if manifest is None:
        publish(directory, UNFINISHED, {"plan": plan})
        entries = {name: read_document(directory / sidecar(name)) for name in shards}
        finished = {
            name: entry
            for name, entry in entries.items()
            if entry is not None and is_whole(directory, name, entry)
        }
    else:
        finished = {
            name: manifest["files"][name]
            for name in shards
            if is_whole(directory, name, manifest["files"][name], content=True)
        }
        none = manifest["files"][UNCONDITIONAL]
        if len(finished) == len(shards) and is_whole(directory, UNCONDITIONAL, none, content=True):
            return finished
        reopen(directory, plan, finished)
    write_tensors(directory, UNCONDITIONAL, {k: v[0] for k, v in encoder.condition([""]).items()})
    return finished


def reopen(directory: Path, plan: Plan, finished: Mapping[str, ShardEntry]) -> None:
    """Take complete data as unfinished, so that what is not finished is made again."""
    publish(directory, UNFINISHED, {"plan": plan})
    for name, entry in finished.items():
        publish(directory, sidecar(name), entry)
    (directory / MANIFEST).unlink()
    sync_directory(directory)


def is_whole(directory: Path, name: str, entry: Mapping[str, Any], content: bool = False) -> bool:
    """Whether a file is what its entry says; of a shard without items there is none."""
    return not entry["size"] or check_file(directory / name, entry, content) is None


def sidecar(name: str) -> str:
    """The file that says that a shard is finished, until there is a manifest."""
    return name.replace(".safetensors", ".json")


def finish(
    settings: TextToImageData,
    plan: Plan,
    shards: Shards,
    finished: Mapping[str, ShardEntry],
    made: int,
) -> Encoded:
    """Publish the manifest of finished shards, unless it is there.

    Raises:
        UserError: where no item of a split is left.
    """
    directory = settings.directory
    entries = {n: finished.get(n) or read_document(directory / sidecar(n)) for n in shards}
    skipped = [each for entry in entries.values() for each in entry["skipped"]]
    check_skipped(settings, skipped)
    splits: dict[str, list[str]] = {}
    for name, entry in entries.items():
        splits.setdefault(name.partition("-")[0], []).extend([name] if entry["items"] else [])
    for split, names in splits.items():
        if not names:
            raise UserError(
                f"data: no {split} item can be used, {len(skipped)} were skipped; the first: "
                f"{': '.join(skipped[0])}"
            )
    items = {split: sum(entries[n]["items"] for n in names) for split, names in splits.items()}
    files = {**entries, UNCONDITIONAL: describe_file(directory / UNCONDITIONAL)}
    size = sum(entry["size"] for entry in files.values())
    if not (directory / MANIFEST).exists():
        first = splits["train"][0]
        document = {
            "plan": plan,
            "items": items,
            "condition": shapes(directory / first, CONDITION),
            "x0": shapes(directory / first, SAMPLES).get("") if settings.name == "images" else None,
            "splits": splits,
            "files": files,
            "skipped": skipped,
        }
        publish(directory, MANIFEST, document)
        for name in (UNFINISHED, *map(sidecar, shards)):
            (directory / name).unlink(missing_ok=True)
        for file in directory.glob(".*.tmp"):
            file.unlink()
    count = sum(1 for entry in files.values() if entry["size"])
    return Encoded(directory, items, skipped, made, count, size)


def shapes(file: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """Shape of one row and dtype of the tensors in a shard whose names begin so."""
    with safe_open(file, framework="pt") as opened:
        names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
        parts = {name: opened.get_slice(name) for name in names}
        return {
            key.removeprefix(prefix): {"shape": part.get_shape()[1:], "dtype": part.get_dtype()}
            for key, part in sorted(parts.items())
        }


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
