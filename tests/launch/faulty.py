"""The command `fewstep` with a fault in one rank, which the environment variable FAULT describes.

FAULT is `kind:rank:cycle`. The fault comes in the cycle's first fake_score phase. Every rank makes
a file in the folder PIDS, named by its process; the broken one writes the time of its fault there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fewstep import cli
from fewstep.launch import command
from fewstep.launch.processes import Ended, launch
from fewstep.training.phase import PhaseRequest, PhaseResult
from fewstep.training.worker import Worker


def spin() -> None:
    """Hang in Python code, deaf to errors."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def fail(kind: str) -> None:
    """Do what the fault is."""
    if kind == "raise":
        raise ValueError("this rank is broken")
    if kind == "spin":
        spin()
    if kind == "wait":  # for a message that nobody sends
        dist.recv(torch.zeros(1), src=1 - dist.get_rank(), tag=7)
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
    os.kill(os.getpid(), numbers[kind])


original = Worker._run_phase


def run_phase(self: Worker, request: PhaseRequest) -> PhaseResult:
    """A phase, or the fault instead."""
    kind, rank, cycle = os.environ["FAULT"].split(":")
    file = Path(os.environ["PIDS"]) / str(os.getpid())
    file.touch()
    if (self.ranks.rank, request.cycle, request.name) == (int(rank), int(cycle), "fake_score/0"):
        file.write_text(str(time.time()))
        fail(kind)
    return original(self, request)


def launch_this(arguments: Sequence[str], *rest: Any) -> Ended:
    """Start this script in every process, instead of `-m fewstep`."""
    return launch([__file__, *arguments[2:]], *rest)


if __name__ == "__main__":
    Worker._run_phase = run_phase  # type: ignore[method-assign]
    command.launch = launch_this
    sys.argv[0] = "fewstep"
    cli.main()
