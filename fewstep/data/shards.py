"""WebDataset shards: tar files whose members belong together where their names begin alike."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fewstep.data.sources import Blob, Record, record
from fewstep.errors import UserError

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif")


def read_shard(file: Path, column: str | None, images: bool) -> Iterator[Record]:
    """The samples of a shard, in their order.

    Args:
        file: a plain tar file.
        column: the key of the text in each sample's .json; None: its .txt is the text.
        images: whether samples have images as well.

    Raises:
        UserError: where the file is no tar file or ends too early.
    """
    for key, members, twice in _samples(file):
        where = f"{file}, {key}"
        image = next((members[e] for e in IMAGE_ENDINGS if e in members), None)
        if twice:
            problem = f"it has {', '.join(f'.{e}' for e in twice)} twice: are these two samples?"
            yield Record(where, problem=problem)
        elif images and image is None:
            endings = ", ".join(f".{ending}" for ending in members)
            yield Record(where, problem=f"there is no image: its members are {endings}")
        elif column is None:
            yield _of_text(where, members.get("txt"), image)
        else:
            yield _of_json(where, members.get("json"), column, image)


def _of_text(where: str, blob: Blob | None, image: Blob | None) -> Record:
    if blob is None:
        return Record(where, problem="there is no .txt", image=image)
    try:
        return record(where, blob.read().decode("utf-8-sig"), image)
    except UnicodeDecodeError:
        return Record(where, problem="its .txt is not UTF-8", image=image)


def _of_json(where: str, blob: Blob | None, column: str, image: Blob | None) -> Record:
    if blob is None:
        return Record(where, problem="there is no .json", image=image)
    try:
        values: Any = json.loads(blob.read())
    except (ValueError, RecursionError):  # the latter: brackets a thousand deep
        return Record(where, problem="its .json cannot be read", image=image)
    if not isinstance(values, dict) or column not in values:
        names = ", ".join(values) if isinstance(values, dict) else "no keys"
        return Record(where, problem=f"its .json has no {column!r} ({names})", image=image)
    return record(where, values[column], image)


def _samples(file: Path) -> Iterator[tuple[str, dict[str, Blob], list[str]]]:
    """Neighbours of the same key: its members by ending, in lower case, and endings met twice."""
    current: str | None = None
    members: dict[str, Blob] = {}
    twice: list[str] = []
    for name, blob in _members(file):
        folder, slash, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        key = f"{folder}{slash}{stem}"
        if key != current and current is not None:
            yield current, members, twice
            members, twice = {}, []
        current, ending = key, ending.lower()
        if ending in members:
            twice.append(ending)
        members[ending] = blob
    if current is not None:
        yield current, members, twice


def _members(file: Path) -> Iterator[tuple[str, Blob]]:
    size = file.stat().st_size
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                if member.isfile() and not member.name.rpartition("/")[2].startswith("."):
                    if member.offset_data + member.size > size:
                        raise UserError(f"{file} ends in the middle of {member.name}")
                    yield member.name, Blob(file, member.offset_data, member.size)
            # The library takes a damaged header for the end of the file, unless it is the first.
            if not _only_zeros(file, tar.offset):
                raise UserError(
                    f"{file} is damaged or cut off: what follows byte {tar.offset} is no end of a "
                    f"tar file"
                )
    except tarfile.TarError as error:
        raise UserError(
            f"{file} is no plain tar file: {error}; shards must not be compressed"
        ) from error


def _only_zeros(file: Path, start: int) -> bool:
    """Whether zeros alone follow, and at least one block of them: so a tar file ends."""
    size = 0
    with open(file, "rb") as stream:
        stream.seek(start)
        while part := stream.read(2**20):
            if part.count(0) < len(part):
                return False
            size += len(part)
    return size >= tarfile.BLOCKSIZE
