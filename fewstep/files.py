"""Writing files so that they are whole on the disk or not there at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypedDict

from fewstep.errors import UserError

# It can be read only by setting it, which is no good once there are threads.
_UMASK = os.umask(0o077)
os.umask(_UMASK)


class FileEntry(TypedDict):
    """What a manifest says of a file."""

    size: int
    sha256: str


def write_file(file: Path, content: bytes) -> FileEntry:
    """Write a file and flush it to the disk."""
    with open(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sync_file(file: Path) -> None:
    """Flush to the disk what was written into a file that is closed."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_file(file: Path) -> FileEntry:
    """Size and SHA-256 of a file."""
    return {"size": file.stat().st_size, "sha256": digest(file)}


def digest(file: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def permit_as_usual(files: Iterable[Path]) -> None:
    """Let others read files as they may read any new file: safetensors makes its own private."""
    for file in files:
        file.chmod(0o666 & ~_UMASK)


def failure_to_write(error: Exception) -> str | None:
    """What kept a file from being written, in words; None for any other kind of error."""
    number = getattr(error, "errno", None)
    # Libraries wrap the operating system's errors: safetensors' has the words only.
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return "no space is left on the device"
    return str(error) if isinstance(error, OSError) else None


@contextlib.contextmanager
def saving(what: Path, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn failures to write into a UserError that says so, after cleaning up."""
    try:
        yield
    except Exception as error:
        clean_up()
        reason = failure_to_write(error)
        if reason is None:
            raise
        raise UserError(
            f"{what} could not be written: {reason}. Nothing was published; what was saved "
            f"before is untouched"
        ) from error


def check_place(directory: Path, key: str) -> None:
    """See that files can be written in a directory, or where it would have to be made.

    For what takes long to make, and would be lost where it cannot be written in the end.

    Args:
        directory: need not exist.
        key: of the recipe or the command line, for messages.

    Raises:
        UserError: where they cannot.
    """
    absolute = directory.absolute()
    parent = next(p for p in [absolute, *absolute.parents] if os.path.lexists(p))
    if not parent.is_dir():
        kind = "a link to nothing" if parent.is_symlink() else "a file"
        raise UserError(f"{key}: {directory} cannot be made: {parent} is {kind}")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{key}: {directory} cannot be written (no permission for {parent})")
