"""Launches of many cases on several ranks, and the same cases in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cases import Case, run_cases, train
from torch import Tensor

from benchmarks.ranks import on_ranks

Launch = Callable[[int, Sequence[Case]], Path]
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
        on_ranks(run_cases, cases, out, size=size)
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
