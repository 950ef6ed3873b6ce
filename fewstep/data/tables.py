"""Text out of lists, tables and data sets: one record a line or row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fewstep.data.sources import HUB, Record, record
from fewstep.errors import UserError

COLUMN = "text"
"""The column that is read where a recipe names none."""

_NEEDED = "needs the library {}: pip install 'fewstep[data]'"


def read_text(file: Path) -> str:
    """The content of a UTF-8 file, with or without a byte-order mark.

    Raises:
        UserError: where it is not UTF-8, naming the line, or cannot be read.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{file}: line {line} is not UTF-8 (byte {content[error.start]:#04x}); save it as UTF-8"
        ) from error


def read_lines(file: Path) -> Iterator[Record]:
    """A prompt a line. Only a line feed ends one: other separators belong to the text."""
    for number, line in enumerate(_lines(read_text(file)), 1):
        yield record(f"{file}:{number}", line)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def read_jsonl(file: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each line's place and object, or what is wrong with it; empty lines do not count."""
    for number, line in enumerate(_lines(read_text(file)), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # the latter: brackets a thousand deep
            value = "the line is not JSON"
        else:
            if not isinstance(value, dict):
                value = "the line is not a JSON object"
        yield f"{file}:{number}", value


def read_csv(file: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each row's place and values by column; texts may hold commas and line feeds in quotes.

    Raises:
        UserError: where the file is no CSV, or has no header.
    """
    csv.field_size_limit(2**30)
    reader = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    try:
        header = next(reader, None)
        if not header:
            raise UserError(f"{file} is empty: its first line should name the columns")
        check_columns(file, header)
        for row in reader:
            place = f"{file}:{reader.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                yield place, f"the row has {len(row)} values for {len(header)} columns"
            else:
                yield place, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UserError(f"{file}: line {reader.line_num} is not CSV: {error}") from error


def column_records(
    rows: Iterable[tuple[str, dict[str, Any] | str]], column: str, file: Path
) -> Iterator[Record]:
    """One column of rows.

    Raises:
        UserError: where no row has that column, naming those that there are.
    """
    names: dict[str, None] = {}
    found = False
    for place, row in rows:
        if isinstance(row, str):
            yield Record(place, problem=row)
            continue
        names |= dict.fromkeys(row)
        found = found or column in row
        yield record(place, row.get(column))
    if names and not found:
        raise no_column(file, column, names)


def check_columns(file: Path, names: Sequence[str]) -> None:
    """Raise UserError where two columns have one name: which of them counts?"""
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise UserError(f"{file} has more than one column {', '.join(map(repr, twice))}")


def no_column(source: object, column: str, names: Iterable[str]) -> UserError:
    """There is no such column in a source; says which there are."""
    return UserError(
        f"data.column: {source} has no column {column!r}; it has {', '.join(map(repr, names))}"
    )


def read_parquet(file: Path, column: str) -> Iterator[Record]:
    """One column of a Parquet file.

    Raises:
        UserError: where the file is damaged or has no such column, or pyarrow is not installed.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"data.files: {file} {_NEEDED.format('pyarrow')}") from error
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if column not in names:
                raise no_column(file, column, names)
            check_columns(file, names)
            number = 0
            for batch in opened.iter_batches(columns=[column]):
                for value in batch.column(0):
                    number += 1
                    yield _of_arrow(f"{file}, row {number}", value)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is no Parquet file that can be read: {error}") from error


def _of_arrow(where: str, value: Any) -> Record:
    try:
        return record(where, value.as_py())
    except UnicodeDecodeError:
        return Record(where, problem="the prompt is not UTF-8")


def read_huggingface(name: str, column: str, split: str) -> Iterator[Record]:
    """One column of a data set of the library datasets.

    Args:
        name: a directory written by its `save_to_disk`, or `hf:` and the id on the hub.
        column: which.
        split: which, where there are several.

    Raises:
        UserError: where there is no such data set, split or column, or the library is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"data.files: {name} {_NEEDED.format('datasets')}") from error
    try:
        if name.startswith(HUB):
            found = datasets.load_dataset(name.removeprefix(HUB))
        else:
            found = datasets.load_from_disk(name)
    except Exception as error:
        # The library has no common base of its errors, and all of them mean this.
        raise UserError(f"data.files: {name} cannot be loaded: {error}") from error
    if isinstance(found, Mapping):
        if split not in found:
            raise UserError(f"data.split: {name} has no {split!r}; it has {', '.join(found)}")
        found = found[split]
    if column not in found.column_names:
        raise no_column(name, column, found.column_names)
    number = 0
    try:
        for row in found.select_columns([column]):
            number += 1
            yield record(f"{name}, row {number}", row[column])
    except UnicodeDecodeError as error:
        raise UserError(f"{name}, after row {number}: a text is not UTF-8: {error}") from error


def is_huggingface(path: Path) -> bool:
    """Whether a directory was written by the library datasets."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
