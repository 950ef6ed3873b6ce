"""Writing files so that they are whole on the disk or not there at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fewstep.errors import UserError


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and flush it; tensors that share memory are written apart."""
    seen: set[int] = set()
    whole = {}
    for key, value in tensors.items():
        value = value.detach().cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        whole[key] = value.clone() if memory in seen else value
        seen.add(memory)
    save_file(whole, file)
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def write_file(file: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with open(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Every file below a directory with its size and SHA-256."""
    return {
        str(file.relative_to(directory)): {"size": file.stat().st_size, "sha256": digest(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def digest(file: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def saving(what: Path, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn failures to write into a UserError that says so, after cleaning up."""
    try:
        yield
    except Exception as error:
        clean_up()
        number = getattr(error, "errno", None)
        full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if not full and not isinstance(error, OSError):
            raise
        reason = "no space is left on the device" if full else str(error)
        raise UserError(
            f"{what} could not be written: {reason}. Nothing was published; what was saved "
            f"before is untouched"
        ) from error
