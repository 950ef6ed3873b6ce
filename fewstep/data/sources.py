"""Where prompts and images come from: files, folders, shards and hubs, and whether they changed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, final

from fewstep.errors import UserError
from fewstep.files import digest

HUB = "hf:"


class Stamp(TypedDict):
    """What is remembered of a source.

    `quick` is a hash of names, sizes and times of its files: as long as it is the same, so is the
    source. `sha256` is that of the content, which decides where the times have changed.
    """

    quick: str
    sha256: str


@final
@dataclass(frozen=True)
class Blob:
    """A stretch of a file, read when it is needed.

    Attributes:
        file: where it is.
        start: of its first byte.
        size: in bytes; None: up to the end.
    """

    file: Path
    start: int = 0
    size: int | None = None

    def read(self) -> bytes:
        """Its content; raises OSError where it cannot be read."""
        with open(self.file, "rb") as stream:
            stream.seek(self.start)
            return stream.read() if self.size is None else stream.read(self.size)


@final
@dataclass(frozen=True)
class Record:
    """One item of a source, before it is looked at closely.

    Attributes:
        where: its place, for people: file and line, row, or member.
        text: its prompt, where there is one.
        problem: what is wrong with it, where that is known already.
        image: its image, where there is one.
    """

    where: str
    text: str | None = None
    problem: str | None = None
    image: Blob | None = None

    def fault(self) -> str | None:
        """What is wrong with its prompt; None: nothing."""
        if self.problem is None and not (self.text or "").strip():
            return "the prompt is empty"
        return self.problem


def record(where: str, text: Any, image: Blob | None = None) -> Record:
    """A record of a value that ought to be text; its spaces at both ends do not count."""
    if isinstance(text, str):
        return Record(where, text.strip(), broken_text(text), image)
    if text is None:
        return Record(where, problem="there is no prompt", image=image)
    return Record(where, problem=f"the prompt is no text but {type(text).__name__}", image=image)


def broken_text(text: str) -> str | None:
    """What keeps a string from being text that an encoder takes; None: nothing.

    JSON, and the arguments of a command, can hold one half of a pair of surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the prompt is no Unicode text: character {error.start + 1} is half of one"
    return None


def expand(key: str, patterns: Sequence[str]) -> list[str]:
    """The files, folders and hub ids that patterns stand for, in their order; globs sorted.

    Args:
        key: of the recipe, for errors.
        patterns: paths, perhaps with braces (`{00..07}`, `{a,b}`) or as globs; `hf:` and an id.

    Raises:
        UserError: for what matches nothing, or is there twice.
    """
    found: list[str] = []
    for pattern in patterns:
        if pattern.startswith(HUB):
            found.append(pattern)
            continue
        paths = [pattern] if os.path.exists(pattern) else list(braces(pattern))
        if not paths:
            raise UserError(f"{key}: {pattern!r} matches nothing: its numbers should go up")
        for path in paths:
            matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
            if not matches:
                raise UserError(f"{key}: {path!r} does not exist, or matches nothing")
            found += matches
    seen: set[str] = set()
    for path in found:
        if (place := real(path)) in seen:
            raise UserError(f"{key}: {path} is named twice")
        seen.add(place)
    return found


def real(name: str) -> str:
    """What a source is known by however its path is spelled; a hub's id is the same always."""
    return name if name.startswith(HUB) else os.path.realpath(name)


def holds(folder: str, path: str) -> bool:
    """Whether a path is that of a folder or of something in it, there or not."""
    if folder.startswith(HUB) or not os.path.isdir(folder):
        return False
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def braces(pattern: str) -> Iterator[str]:
    """What a pattern with braces stands for: `a{0..2}` and `{x,y}`; zeros in front are kept."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    head, tail = pattern[: match.start()], pattern[match.end() :]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if numbers is not None:
        width = len(numbers[1])
        first, last = int(numbers[1]), int(numbers[2])
        choices: Iterable[str] = (f"{n:0{width}d}" for n in range(first, last + 1))
    elif "," in match[1]:
        choices = match[1].split(",")
    else:
        yield pattern
        return
    for choice in choices:
        yield from braces(head + choice + tail)


def stamp_all(paths: Mapping[str, Path], known: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """Stamps of files or folders by name; one is read only where nothing is known of it as it is.

    Raises:
        UserError: where one cannot be read.
    """
    try:
        return {name: _stamp(path, known.get(name)) for name, path in paths.items()}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


def local(names: Iterable[str]) -> dict[str, Path]:
    """Those of the sources that are there, by name; what a hub keeps is its own to look after."""
    return {n: Path(n) for n in names if not n.startswith(HUB) and os.path.exists(n)}


def changed(paths: Mapping[str, Path], known: Mapping[str, Stamp]) -> list[str]:
    """Names of what has another content now; what is gone cannot be compared."""
    present = {name: path for name, path in paths.items() if name in known and path.exists()}
    now = stamp_all(present, known)
    return [name for name in present if now[name]["sha256"] != known[name]["sha256"]]


def _stamp(path: Path, known: Stamp | None) -> Stamp:
    files = _files(path)
    facts = [(name, s.st_size, s.st_mtime_ns) for name, s in ((n, f.stat()) for n, f in files)]
    quick = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if known is not None and known["quick"] == quick:
        return known
    if not path.is_dir():
        return {"quick": quick, "sha256": digest(path)}
    content = json.dumps([(name, digest(file)) for name, file in files])
    return {"quick": quick, "sha256": hashlib.sha256(content.encode()).hexdigest()}


def _files(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [(path.name, path)]
    files = (file for file in path.rglob("*") if file.is_file())
    return sorted((str(file.relative_to(path)), file) for file in files)
