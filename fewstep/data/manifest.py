"""What an encoded data set was made from and what it holds: one JSON file, written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from fewstep.data.dataset import Split
from fewstep.errors import UserError
from fewstep.files import digest, saving, sync_directory, write_file

MANIFEST, UNFINISHED, UNCONDITIONAL = "manifest.json", "unfinished.json", "none.safetensors"
VERSION = 1
"""Of the form of the files."""


class ShardEntry(TypedDict):
    """What is known of one shard.

    `size` and `sha256` are those of its file, `items` how many there are in it, and `skipped` the
    records that were left out, each with its place and what is wrong. A shard of none has no file.
    """

    size: int
    sha256: str
    items: int
    skipped: list[list[str]]


Plan = dict[str, Any]
"""What a data set is made from: sections of plain values, see `differences`."""


def publish(directory: Path, name: str, document: Any) -> None:
    """Write a JSON file into a directory: it is there as a whole or not at all."""
    temporary = directory / f".{name}.tmp"
    with saving(directory / name, lambda: temporary.unlink(missing_ok=True)):
        write_file(temporary, json.dumps(document, indent=1, ensure_ascii=False).encode())
        temporary.replace(directory / name)
        sync_directory(directory)


def read_document(file: Path) -> Any:
    """A JSON file that `publish` has written; None where there is none.

    Raises:
        UserError: where it is damaged.
    """
    if not file.is_file():
        return None
    try:
        document = json.loads(file.read_bytes())
        version = document["plan"]["version"] if "plan" in document else VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged and cannot be read: {error}. Encode anew with --overwrite"
        ) from error
    if version != VERSION:
        raise UserError(
            f"{file} was written by another version of fewstep, in a form that this one does not "
            f"read. Encode anew with --overwrite"
        )
    return document


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dots between the keys; of a source's stamp its SHA-256 alone."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value.keys() == {"quick", "sha256"}:
            value = f"content {value['sha256'][:12]}"
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What two plans do not agree about, a line each."""
    before, after = flatten(old), flatten(new)
    return [
        f"  {key}: was {before.get(key, '(absent)')!r}, is {after.get(key, '(absent)')!r}"
        for key in sorted({*before, *after})
        if before.get(key, ...) != after.get(key, ...)
    ]


def shard_name(split: Split, index: int) -> str:
    """The file of a shard."""
    return f"{split}-{index:05d}.safetensors"


def check_file(file: Path, entry: Mapping[str, Any], content: bool = False) -> str | None:
    """What is wrong with a file of a data set, or None.

    Args:
        file: to look at.
        entry: its `size` and `sha256`.
        content: whether to read all of it.
    """
    try:
        size = file.stat().st_size
        if size != entry["size"]:
            return f"{file} has {size} bytes instead of {entry['size']}"
        if content and digest(file) != entry["sha256"]:
            return f"{file} is damaged: its SHA-256 differs from the manifest's"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read: {error}"
    return None
