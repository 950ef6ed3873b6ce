"""Runs of several processes: a recipe file, and the processes that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fewstep.config import Recipe, dump_recipe

FAULTY = Path(__file__).with_name("faulty.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TIMEOUT_SECONDS = 240
# Networks that need neither diffusers nor PEFT, which take seconds to import in every process.
CHEAP = {"model": {"family": "mixture", "width": 8, "depth": 1}, "method.guidance": 1.0}


@dataclass
class Started:
    """A command that trains, and what it has started."""

    process: subprocess.Popen[str]
    run_dir: Path
    pids: Path

    def ranks(self) -> list[int]:
        """The process numbers of its ranks, once both have begun to train."""
        return sorted(int(file.name) for file in self.pids.iterdir())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait while it runs."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)

    def wait_for_cycle(self) -> None:
        """Wait until the first cycle is done."""
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and '"fake_score"' in metrics.read_text())
        assert len(self.ranks()) == 2

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; nothing is left behind."""
        out, err = self.process.communicate(timeout=TIMEOUT_SECONDS)
        assert [pid for pid in self.ranks() if exists(pid)] == []
        return self.process.returncode, out, err


def exists(pid: int, patience_seconds: float = 0.0) -> bool:
    """Whether a process exists that has not ended; a parent may not have noticed its end yet."""
    end = time.monotonic() + patience_seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        if time.monotonic() > end:
            return True
        time.sleep(0.05)


@pytest.fixture
def is_running() -> Callable[[int, float], bool]:
    """Whether a process is still there after so many seconds."""
    return exists


Start = Callable[..., Started]


@pytest.fixture
def recipe_file(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    """A tiny recipe for two ranks, as a file."""
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(make_recipe("dmd2", {**CHEAP, "launch.timeout_seconds": 30})))
    return file


@pytest.fixture
def start(recipe_file: Path, tmp_path: Path) -> Iterator[Start]:
    """Start `fewstep train` in two processes, with a fault if one is given."""
    started: list[Started] = []

    def begin(*changes: str, fault: str = "none:0:0", torchrun: bool = False) -> Started:
        pids = tmp_path / "pids"
        pids.mkdir()
        launcher = TORCHRUN if torchrun else [sys.executable]
        changes = changes if torchrun else ("launch.processes=2", *changes)
        process = subprocess.Popen(
            [*launcher, str(FAULTY), "train", str(recipe_file), *changes],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "300", "FAULT": fault, "PIDS": str(pids)},
        )
        started.append(Started(process, tmp_path / "run", pids))
        return started[-1]

    yield begin
    for each in started:
        for pid in [each.process.pid, *each.ranks()]:
            if exists(pid):
                os.kill(pid, signal.SIGKILL)
        each.process.wait()
