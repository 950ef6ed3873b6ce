"""A run that is stopped and gone on with, on the same ranks or on others, is the same run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, largest_difference, train
from safetensors.torch import load_file
from torch import Tensor

KINDS = ("none", "ddp", "fsdp1", "fsdp2")
SHARED = {"storage": "shared_base"}
FOUR = {"train.cycles": 4}
# Four cycles of six samples of ten images: the second crosses the end of an epoch.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "independent": ("dmd2", {"cycle.warmup_cycles": 3}),
    "shared_base": ("dmd2", SHARED),
    "warm-up": ("dmd2", {**SHARED, "cycle.warmup_cycles": 2, "checkpoint.asynchronous": True}),
    "data": ("flow_matching", {}),
}
# Every kind with a network for each role or with a shared one, and every variant with FSDP.
LEFT_OUT = {("none", "independent"), ("none", "warm-up"), ("ddp", "shared_base"), ("ddp", "data")}
EXACT = {
    f"{kind}-{name}": Case(f"{kind}-{name}", {"parallel.kind": kind, **FOUR, **changes}, method)
    for kind in KINDS
    for name, (method, changes) in VARIANTS.items()
    if (kind, name) not in LEFT_OUT
}


def changed(case: Case, **what: Any) -> Case:
    """Another case with the same recipe."""
    return Case(**{"changes": case.changes, "method": case.method, "name": case.name, **what})


@pytest.fixture(scope="module")
def on_two(launch: Any) -> Path:
    """Every case uninterrupted, and stopped after two cycles and gone on with."""
    cases = []
    for name, case in EXACT.items():
        cases += [
            case,
            changed(case, name=f"{name}-again", stop_after=2),
            changed(case, name=f"{name}-again", resume="here"),
        ]
    return launch(2, cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXACT)
def test_two_and_two_cycles_are_four_bit_for_bit(on_two: Path, name: str) -> None:
    whole, again = (load_file(on_two / f"{n}.result") for n in (name, f"{name}-again"))
    assert 0 < len(again["losses"]) < len(whole["losses"])
    whole["losses"] = whole["losses"][-len(again["losses"]) :]
    assert_equal(whole, again)


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


# Saved on four ranks; from which kind to which, and on how many ranks.
SAVED = {
    f"{kind}-{name}": Case(
        f"{kind}-{name}",
        {"parallel.kind": kind, **FOUR, **VARIANTS[name][1]},
        VARIANTS[name][0],
        stop_after=2,
    )
    for kind, name in (
        ("fsdp1", "shared_base"),
        ("fsdp1", "independent"),
        ("fsdp2", "shared_base"),
        ("fsdp2", "data"),
        ("ddp", "independent"),
    )
}
ON = (
    ("fsdp1-shared_base", "fsdp2"),
    ("fsdp1-independent", "fsdp1"),
    ("fsdp2-shared_base", "fsdp1"),
    ("fsdp2-shared_base", "none"),
    ("fsdp2-data", "fsdp2"),
    ("ddp-independent", "fsdp2"),
)


@pytest.fixture(scope="module")
def on_four(launch: Any) -> Path:
    """Runs of two cycles, saved by four ranks."""
    return launch(4, list(SAVED.values()))


@pytest.fixture(scope="module")
def resumed_on_two(launch: Any, on_four: Path) -> Path:
    """Gone on with by two ranks, of the same kind or another."""
    return launch(
        2,
        [
            Case(
                f"{name}-to-{kind}",
                {**SAVED[name].changes, "parallel.kind": kind},
                SAVED[name].method,
                resume=str(on_four / name),
            )
            for name, kind in ON
        ],
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "kind"), ON)
def test_four_ranks_to_two(resumed_on_two: Path, alone: Any, name: str, kind: str) -> None:
    found = load_file(resumed_on_two / f"{name}-to-{kind}.result")
    assert_close(alone(changed(SAVED[name], stop_after=0)), found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAVED)
def test_four_ranks_to_one(on_four: Path, alone: Any, name: str, tmp_path: Path) -> None:
    shutil.copytree(on_four / name, tmp_path / name)
    changes = {**SAVED[name].changes, "parallel.kind": "none"}
    found = train(Case(name, changes, SAVED[name].method, resume="here"), tmp_path)
    assert_close(alone(changed(SAVED[name], stop_after=0)), found)


def assert_close(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert torch.equal(expected["counters"], found["counters"])
    expected["losses"] = expected["losses"][-len(found["losses"]) :]
    for part, tolerance in (("losses", 1e-9), ("networks", 1e-9), ("samples", 1e-6)):
        difference, where = largest_difference(expected, found, part)
        assert difference < tolerance, where
