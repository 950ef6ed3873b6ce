"""Launches of many cases on several ranks, and the same cases in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cases import Case, train, write_cases
from torch import Tensor

Launch = Callable[[int, Sequence[Case]], Path]
TORCHRUN = [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]]
# What may be done otherwise without another result.
HOW = ("parallel", "train.micro", "runtime.activation", "method.score")


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run cases on so many ranks, once for all tests; gives the directory of the results."""

    known: dict[str, Path] = {}

    def start(size: int, cases: Sequence[Case]) -> Path:
        name = repr((size, cases))
        if name not in known:
            known[name] = run(size, cases)
        return known[name]

    def run(size: int, cases: Sequence[Case]) -> Path:
        out = tmp_path_factory.mktemp(f"ranks{size}")
        write_cases(out / "cases.json", cases)
        script = str(Path(__file__).with_name("cases.py"))
        done = subprocess.run(
            [*TORCHRUN, str(size), script, str(out / "cases.json"), str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return out

    return start


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], dict[str, Tensor]]:
    """The same case in this process: whole batches, nothing recomputed, scores one by one."""
    known: dict[str, dict[str, Tensor]] = {}

    def run(case: Case) -> dict[str, Tensor]:
        kept = {k: v for k, v in case.changes.items() if not k.startswith(HOW)}
        name = repr((case.method, sorted(kept.items()), case.tamper, case.odd))
        if name not in known:
            simple = Case("run", kept, case.method, tamper=case.tamper, odd=case.odd)
            known[name] = train(simple, tmp_path_factory.mktemp("alone"))
        return dict(known[name])

    return run
