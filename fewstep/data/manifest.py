"""What an encoded data set was made from and what it holds: one JSON file, written last."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from fewstep.data.dataset import Split
from fewstep.errors import UserError
from fewstep.files import digest, saving, sync_directory, write_file

MANIFEST, UNFINISHED, UNCONDITIONAL = "manifest.json", "unfinished.json", "none.safetensors"
VERSION = 2
"""Of the form of the files."""
KEYS = {MANIFEST: {"plan", "items", "splits", "files", "skipped"}, UNFINISHED: {"plan"}}
PLAN = {"version", "data", "computed", "sources", "model", "encoders"}
"""Keys by which each document, and the plan in it, is known as one of encoded data."""


class ShardEntry(TypedDict):
    """What is known of one shard.

    `size` and `sha256` are those of its file, `items` how many there are in it, and `skipped` the
    records that were left out, each with its place and what is wrong; `cut` is how many prompts
    were longer than the encoder looks at. A shard of none has no file.
    """

    size: int
    sha256: str
    items: int
    skipped: list[list[str]]
    cut: int


Plan = dict[str, Any]
"""What a data set is made from: sections of plain values, see `differences`."""


def publish(directory: Path, name: str, document: Any) -> None:
    """Write a JSON file into a directory: it is there as a whole or not at all."""
    temporary = directory / f".{name}.tmp"
    with saving(directory / name, lambda: temporary.unlink(missing_ok=True)):
        text = json.dumps(document, indent=1, ensure_ascii=False)
        # Of a file's name that is not UTF-8: Python's escapes for its bytes are JSON's.
        write_file(temporary, text.encode(errors="backslashreplace"))
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
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} is damaged and cannot be read: {error}. Remove the directory, if it is one of "
            f"encoded data, and encode anew"
        ) from error


def read_own(directory: Path, name: str, any_version: bool = False) -> dict[str, Any] | None:
    """The manifest of a directory, or its forerunner; None where there is none.

    Args:
        directory: perhaps of something else, with a file of that name.
        name: MANIFEST or UNFINISHED.
        any_version: whether those of other versions will do.

    Raises:
        UserError: where it is damaged, or no document of encoded data.
    """
    document: Any = read_document(directory / name)
    if document is None:
        return None
    plan = document.get("plan") if isinstance(document, dict) else None
    if not isinstance(plan, dict) or not (KEYS[name] <= document.keys() and plan.keys() >= PLAN):
        raise no_encoded_data(directory)
    if plan["version"] == VERSION or any_version:
        return dict(document)
    raise UserError(
        f"{directory / name} was written by another version of fewstep, in a form that this one "
        f"does not read. Encode anew with --overwrite"
    )


def no_encoded_data(directory: Path) -> UserError:
    """A directory is in other use."""
    return UserError(
        f"data.encoded: {directory} holds something that is no encoded data; name another directory"
    )


def sidecar(name: str) -> str:
    """The file that says that a shard is finished, until there is a manifest."""
    return name.replace(".safetensors", ".json")


def own_files(document: Mapping[str, Any]) -> list[str]:
    """Names of the files that a manifest, or its forerunner, speaks of, and those beside them."""
    records = document["plan"]["computed"]["records"]
    named = {*records, *document.get("files", {}), UNCONDITIONAL}
    shards = sorted(name for name in named if re.fullmatch(r"[a-z]+(-\d+)?\.safetensors", name))
    ours = [*shards, *(sidecar(name) for name in shards if name != UNCONDITIONAL)]
    return [*ours, *temporaries(ours)]


def temporaries(names: Iterable[str]) -> list[str]:
    """The files that a kill may leave where these, and the documents, were being written."""
    return [f".{name}.tmp" for name in (*names, MANIFEST, UNFINISHED)]


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
