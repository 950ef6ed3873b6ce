"""A run that is stopped and gone on with, on the same ranks or on others, is the same run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, largest_difference, rest_of, train
from safetensors.torch import load_file
from torch import Tensor

SHARED = {"storage": "shared_base"}
FOUR = {"train.cycles": 4}
# Four cycles of six samples of ten images: the second crosses the end of an epoch.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "independent": ("dmd2", {"cycle.warmup_cycles": 3}),
    "shared_base": ("dmd2", SHARED),
    "warm-up": ("dmd2", {**SHARED, "cycle.warmup_cycles": 2, "checkpoint.asynchronous": True}),
    "data": ("flow_matching", {}),
}
Cases = dict[str, Case]
EXHAUSTIVE = pytest.mark.exhaustive


def cases_of(pairs: Iterable[tuple[str, str]], **what: Any) -> Cases:
    """Cases of a kind of sharding and a variant each, by name."""
    return {
        f"{kind}-{name}": Case(
            f"{kind}-{name}",
            {"parallel.kind": kind, **FOUR, **VARIANTS[name][1]},
            VARIANTS[name][0],
            **what,
        )
        for kind, name in pairs
    }


# Every kind with a network for each role or with a shared one, and every variant with FSDP.
EXACT = cases_of(
    (
        ("ddp", "independent"),
        ("fsdp1", "shared_base"),
        ("fsdp1", "data"),
        ("fsdp2", "independent"),
        ("fsdp2", "warm-up"),
    )
)
MORE_EXACT = cases_of(
    (
        ("none", "shared_base"),
        ("none", "data"),
        ("ddp", "warm-up"),
        ("fsdp1", "independent"),
        ("fsdp1", "warm-up"),
        ("fsdp2", "shared_base"),
        ("fsdp2", "data"),
    )
)


def changed(case: Case, **what: Any) -> Case:
    """Another case with the same recipe."""
    return Case(**{"changes": case.changes, "method": case.method, "name": case.name, **what})


def on_two(launch: Any, exact: Cases) -> Path:
    """Every case uninterrupted, and stopped after two cycles and gone on with."""
    cases = []
    for name, case in exact.items():
        cases += [
            case,
            changed(case, name=f"{name}-again", stop_after=2),
            changed(case, name=f"{name}-again", resume="here"),
        ]
    return launch(2, cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("exact", "name"),
    [
        pytest.param(exact, name, id=name, marks=marks)
        for exact, marks in ((EXACT, ()), (MORE_EXACT, EXHAUSTIVE))
        for name in exact
    ],
)
def test_two_and_two_cycles_are_four_bit_for_bit(launch: Any, exact: Cases, name: str) -> None:
    files = on_two(launch, exact)
    whole, again = (load_file(files / f"{n}.result") for n in (name, f"{name}-again"))
    assert 0 < len(again["losses"]) < len(whole["losses"])
    assert_equal(rest_of(whole, again), again)


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


# Saved on four ranks; from which kind to which, and on how many ranks.
To = tuple[tuple[str, str], ...]
SAVED = cases_of(
    (("fsdp1", "shared_base"), ("fsdp2", "shared_base"), ("ddp", "independent")), stop_after=2
)
TO: To = (
    ("fsdp1-shared_base", "fsdp2"),
    ("fsdp2-shared_base", "fsdp1"),
    ("fsdp2-shared_base", "none"),
    ("ddp-independent", "fsdp2"),
)
MORE_SAVED = cases_of((("fsdp1", "independent"), ("fsdp2", "data")), stop_after=2)
MORE_TO: To = (("fsdp1-independent", "fsdp1"), ("fsdp2-data", "fsdp2"))


def on_four(launch: Any, saved: Cases) -> Path:
    """Runs of two cycles, saved by four ranks."""
    return launch(4, list(saved.values()))


def resumed_on_two(launch: Any, saved: Cases, to: To) -> Path:
    """Gone on with by two ranks, of the same kind or another."""
    directory = on_four(launch, saved)
    cases = [
        Case(
            f"{name}-to-{kind}",
            {**saved[name].changes, "parallel.kind": kind},
            saved[name].method,
            resume=str(directory / name),
        )
        for name, kind in to
    ]
    return launch(2, cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("saved", "to", "name", "kind"),
    [
        pytest.param(saved, to, name, kind, id=f"{name}-{kind}", marks=marks)
        for saved, to, marks in ((SAVED, TO, ()), (MORE_SAVED, MORE_TO, EXHAUSTIVE))
        for name, kind in to
    ],
)
def test_four_ranks_to_two(
    launch: Any, alone: Any, saved: Cases, to: To, name: str, kind: str
) -> None:
    found = load_file(resumed_on_two(launch, saved, to) / f"{name}-to-{kind}.result")
    assert_close(alone(changed(saved[name], stop_after=0)), found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("saved", "name"),
    [
        pytest.param(saved, name, id=name, marks=marks)
        for saved, marks in ((SAVED, ()), (MORE_SAVED, EXHAUSTIVE))
        for name in saved
    ],
)
def test_four_ranks_to_one(
    launch: Any, alone: Any, saved: Cases, name: str, tmp_path: Path
) -> None:
    shutil.copytree(on_four(launch, saved) / name, tmp_path / name)
    changes = {**saved[name].changes, "parallel.kind": "none"}
    found = train(Case(name, changes, saved[name].method, resume="here"), tmp_path)
    assert_close(alone(changed(saved[name], stop_after=0)), found)


def assert_close(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert torch.equal(expected["counters"], found["counters"])
    expected = rest_of(expected, found)
    for part, tolerance in (("losses", 1e-9), ("networks", 1e-9), ("samples", 1e-6)):
        difference, where = largest_difference(expected, found, part)
        assert difference < tolerance, where
