"""Prompts out of files of any of the known kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fewstep.data.shards import read_shard
from fewstep.data.sources import HUB, Record
from fewstep.data.tables import (
    COLUMN,
    column_records,
    is_huggingface,
    read_csv,
    read_huggingface,
    read_jsonl,
    read_lines,
    read_parquet,
)
from fewstep.errors import UserError

KINDS = ".txt, .jsonl, .csv, .parquet, .tar, a directory of datasets.save_to_disk, or hf:ID"


def read_prompts(names: Sequence[str], column: str | None, split: str) -> list[Record]:
    """All records of some sources, in their order.

    Args:
        names: as `expand` has found them.
        column: of the text; None: "text", and the .txt of samples in shards.
        split: of data sets that have several.

    Raises:
        UserError: for a source of another kind, without any record, or that cannot be read.
    """
    found: list[Record] = []
    for name in names:
        records = list(_read(name, column, split))
        if not records:
            raise UserError(f"data.files: {name} is empty: there is no prompt in it")
        found += records
    return found


def _read(name: str, column: str | None, split: str) -> Iterator[Record]:
    file, wanted = Path(name), column or COLUMN
    if name.startswith(HUB) or (file.is_dir() and is_huggingface(file)):
        return read_huggingface(name, wanted, split)
    if file.is_dir():
        raise UserError(f"data.files: {name} is a directory, but not one of {KINDS}")
    match file.suffix.lower():
        case ".txt":
            if column is not None:
                raise UserError(f"data.column: {column!r} is given, but {name} has no columns")
            return read_lines(file)
        case ".jsonl":
            return column_records(read_jsonl(file), wanted, file)
        case ".csv":
            return column_records(read_csv(file), wanted, file)
        case ".parquet":
            return read_parquet(file, wanted)
        case ".tar":
            return read_shard(file, column, images=False)
    raise UserError(f"data.files: {name} is of no known kind: {KINDS}")
