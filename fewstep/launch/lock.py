"""One process at a time writes into a directory."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import final

from fewstep.errors import UserError

try:
    import fcntl
except ImportError:  # not a Unix: nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
TRAINS_THERE = (
    "run_dir: {directory} is in use: process {holder} trains there; wait for its end, or choose "
    "another directory with --run-dir"
)


@final
class RunLock:
    """The right to write into a directory, held until `release` or the process's end.

    The operating system keeps it, so nothing that a killed process leaves behind is in the way.
    """

    def __init__(self, directory: Path, in_use: str = TRAINS_THERE) -> None:
        """`directory`: it need not exist yet; `in_use`: what is said where another has it."""
        self._file = directory / LOCK
        self._in_use = in_use
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise UserError where another process holds the lock; writes nothing."""
        if self._descriptor is None and self._file.exists():
            self.acquire()
            self.release()

    def acquire(self) -> None:
        """Take the lock, unless it is held by this object already.

        Raises:
            UserError: naming the process that holds it.
        """
        while self._descriptor is None and fcntl is not None:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                os.close(descriptor)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # a file system without locks
                raise UserError(
                    self._in_use.format(directory=self._file.parent, holder=holder or "(unknown)")
                ) from error
            if self._is_current(descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                self._descriptor = descriptor
            else:
                os.close(descriptor)  # removed by who held it until now: take the new one

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = None
