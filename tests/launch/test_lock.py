"""One process at a time in a run directory."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from fewstep.errors import UserError
from fewstep.launch.lock import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from fewstep.launch.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(1000)
"""


@pytest.mark.timeout(60)
def test_another_process_is_refused_until_the_first_is_gone_even_by_force(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = RunLock(tmp_path)
        for refused in (lock.check, lock.acquire):
            with pytest.raises(UserError, match=f"is in use: process {holder.pid} trains there"):
                refused()
    finally:
        holder.kill()
        holder.communicate()
    lock.check()
    with lock:
        lock.acquire()
        lock.acquire()  # held already
        with pytest.raises(UserError, match="is in use"):
            RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_checking_writes_nothing(tmp_path: Path) -> None:
    RunLock(tmp_path / "nowhere").check()
    RunLock(tmp_path).check()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, original = RunLock(tmp_path), fcntl.flock
    first.acquire()

    def released_just_now(descriptor: int, operation: int) -> None:
        first.release()
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", released_just_now)
    with RunLock(tmp_path) as second:
        second.acquire()
        with pytest.raises(UserError, match="is in use"):
            RunLock(tmp_path).acquire()


def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock(tmp_path) as lock:
        lock.acquire()
        RunLock(tmp_path).check()
