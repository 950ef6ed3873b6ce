"""The directory of an encoded data set: begun, gone on with, and finished by a manifest."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import safe_open
from torch import Tensor

from fewstep.data.encoded import CONDITION, SAMPLES
from fewstep.data.encoding import Encoder, write_tensors
from fewstep.data.manifest import (
    MANIFEST,
    UNCONDITIONAL,
    UNFINISHED,
    Plan,
    ShardEntry,
    check_file,
    differences,
    no_encoded_data,
    own_files,
    publish,
    read_document,
    read_own,
    sidecar,
    temporaries,
)
from fewstep.data.settings import TextToImageData, check_skipped, stale
from fewstep.data.sources import Record, local, stamp_all
from fewstep.errors import UserError
from fewstep.files import describe_file, saving, sync_directory
from fewstep.models.encoders import Encoding

Shards = dict[str, list[Record]]
"""Records by the name of the file that they go into."""


@final
@dataclass(frozen=True)
class Encoded:
    """What has become of encoding a data set.

    Attributes:
        directory: where it is.
        items: how many there are, by split.
        skipped: the records that were left out, each with its place and what is wrong.
        cut: how many prompts were longer than their encoder looks at.
        trained_on: how many held-out items have a prompt that is among those of training.
        made: how many shards were made now, by all ranks; none where all was there already.
        files: how many files there are.
        bytes: of all files.
    """

    directory: Path
    items: Mapping[str, int]
    skipped: list[list[str]]
    cut: int
    trained_on: int
    made: int
    files: int
    bytes: int


def look_at(settings: TextToImageData, encoding: Encoding, overwrite: bool) -> dict[str, Any]:
    """Look at the directory and the sources before anything is loaded; nothing is changed.

    Returns:
        Sections of a plan: stamps of `sources` and `encoders`, and the `model`'s own settings.

    Raises:
        UserError: where the directory holds something else.
    """
    directory = settings.directory
    check_own(directory)
    plan = None if overwrite else read_plan(directory)
    known = plan or {"sources": {}, "encoders": {}}
    names = [name for names in settings.sources().values() for name in names]
    stamps = {
        "sources": stamp_all(local(names), known["sources"]),
        "model": dict(encoding.settings),
        "encoders": stamp_all(encoding.files, known["encoders"]),
    }
    if plan is not None:
        old = {"data": plan["data"]} | {key: plan[key] for key in stamps}
        if found := differences(old, {"data": settings.facts(), **stamps}):
            raise stale(directory, found)
    return stamps


def read_plan(directory: Path) -> Plan | None:
    """What a directory's data are made from, be they complete or not; None where there are none."""
    for name in (MANIFEST, UNFINISHED):
        document = read_own(directory, name)
        if document is not None:
            plan: Plan = document["plan"]
            return plan
    return None


def check_own(directory: Path) -> None:
    """Raise UserError where a directory is a file, or holds something that is no encoded data."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"data.encoded: {directory} is a file; name a directory")
    present = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    # A kill at the very beginning leaves the first of these alone.
    if not own_documents(directory) and present - {*temporaries([]), ".lock"}:
        raise no_encoded_data(directory)


def own_documents(directory: Path) -> list[dict[str, Any]]:
    """The manifest and its forerunner, of any version, as far as they are there."""
    documents = (read_own(directory, name, any_version=True) for name in (MANIFEST, UNFINISHED))
    return [document for document in documents if document is not None]


def clear(directory: Path) -> None:
    """Remove the files that a directory's manifest names, and no other.

    Until the last of them is gone the directory says that it is one of unfinished data.
    """
    documents = own_documents(directory)
    if not documents:
        return
    names = [name for document in documents for name in own_files(document)]
    publish(directory, UNFINISHED, {"plan": documents[0]["plan"]})
    with saving(directory):
        for name in (MANIFEST, *names, UNFINISHED):
            (directory / name).unlink(missing_ok=True)
        sync_directory(directory)


def begin(
    directory: Path, plan: Plan, shards: Shards, encoder: Encoder, overwrite: bool
) -> dict[str, ShardEntry]:
    """Prepare the directory; the shards that are finished already, by name.

    Of data that are complete, those that are damaged or missing are made again; all of them on
    `overwrite`.

    Raises:
        UserError: where what is there was made from something else.
    """
    with saving(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if overwrite:
        none = unconditional(encoder)  # what is there is removed only after that has worked
        clear(directory)
        publish(directory, UNFINISHED, {"plan": plan})
        write_tensors(directory, UNCONDITIONAL, none)
        return {}
    old = read_plan(directory)
    if old is not None and (found := differences(old, plan)):
        raise stale(directory, found)
    manifest = read_own(directory, MANIFEST)
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
    write_tensors(directory, UNCONDITIONAL, unconditional(encoder))
    return finished


def unconditional(encoder: Encoder) -> dict[str, Tensor]:
    """The condition of the empty prompt."""
    return {key: value[0] for key, value in encoder.condition([""]).items()}


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
            raise nothing_left(split, skipped)
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
        sidecars = [sidecar(name) for name in shards]
        for name in (UNFINISHED, *sidecars, *temporaries([*sidecars, *files])):
            (directory / name).unlink(missing_ok=True)
    count = sum(1 for entry in files.values() if entry["size"])
    cut = sum(entry["cut"] for entry in entries.values())
    left_out = {where for where, _ in skipped}
    known = count_trained_on(shards, left_out)
    return Encoded(directory, items, skipped, cut, known, made, count, size)


def count_trained_on(shards: Shards, left_out: Container[str]) -> int:
    """How many held-out items have a prompt that is among those of training.

    Args:
        shards: all of them.
        left_out: places of records that no item was made of.
    """
    train, held_out = (
        [
            record.text
            for name, records in shards.items()
            if name.startswith(f"{split}-")
            for record in records
            if record.where not in left_out
        ]
        for split in ("train", "validation")
    )
    known = set(train)
    return sum(prompt in known for prompt in held_out)


def nothing_left(split: str, skipped: list[list[str]]) -> UserError:
    """All items of a split were left out."""
    return UserError(
        f"data: no {split} item can be used, {len(skipped)} were skipped; the first: "
        f"{': '.join(skipped[0])}"
    )


def shapes(file: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """Shape of one row and dtype of the tensors in a shard whose names begin so."""
    with safe_open(file, framework="pt") as opened:
        names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
        parts = {name: opened.get_slice(name) for name in names}
        return {
            key.removeprefix(prefix): {"shape": part.get_shape()[1:], "dtype": part.get_dtype()}
            for key, part in sorted(parts.items())
        }
