"""What one process computes for another is checked on arrival."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fewstep.errors import TrainingError
from fewstep.launch.ray.external import Expected, ExternalData, check_external
from fewstep.methods.method import TensorSpec

IDS = torch.arange(3, 6)
GOOD = ExternalData(
    cycle=7,
    rollout="fake_score/1",
    rank=1,
    versions=torch.full((3,), 5),
    sample_ids=IDS,
    tensors={"x0": torch.zeros(3, 2), "count": torch.zeros(3, dtype=torch.int64)},
)
EXPECTED = Expected(
    cycle=7,
    rollout="fake_score/1",
    rank=1,
    versions=range(5, 6),
    sample_ids=IDS,
    tensors={"x0": TensorSpec((2,), torch.float32), "count": TensorSpec((), torch.int64)},
)


def with_x0(x0: torch.Tensor) -> dict[str, Any]:
    return {"tensors": {**GOOD.tensors, "x0": x0}}


def test_what_is_expected_is_taken() -> None:
    check_external(GOOD, EXPECTED)
    assert GOOD.nbytes == 2 * 3 * 8 + 3 * 2 * 4 + 3 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cycle": 6}, "cycle is 6 instead of 7"),
        ({"rollout": "student"}, "rollout is 'student' instead of 'fake_score/1'"),
        ({"rank": 0}, "rank is 0 instead of 1"),
        ({"versions": torch.full((3,), 4)}, "a student after 4 updates, wanted 5 to 5"),
        ({"versions": torch.tensor([5, 6, 5])}, "a student after 5, 6 updates, wanted 5 to 5"),
        ({"versions": torch.full((2,), 5)}, "2 samples are those of a student after 5 updates"),
        ({"sample_ids": torch.arange(4, 7)}, r"sample ids are 3 of them \(4, 5, 6\) instead"),
        ({"sample_ids": torch.arange(3, 5)}, r"sample ids are 2 of them"),
        ({"sample_ids": IDS.int()}, "sample ids are"),
        ({"tensors": {"x0": GOOD.tensors["x0"]}}, "count is missing"),
        ({"tensors": {**GOOD.tensors, "more": IDS}}, "more is left over"),
        (with_x0(torch.zeros(3, 3)), r"x0 has shape \[3, 3\] instead of \[3, 2\]"),
        (with_x0(torch.zeros(2, 2)), r"x0 has shape \[2, 2\] instead of \[3, 2\]"),
        (with_x0(torch.zeros(3, 2).double()), "x0 is of torch.float64 instead of torch.float32"),
        (with_x0(torch.zeros(3, 2, requires_grad=True)), "x0 carries a graph"),
    ],
)
def test_anything_else_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        check_external(replace(GOOD, **change), EXPECTED)


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(TrainingError) as error:
        check_external(replace(GOOD, cycle=1, versions=GOOD.versions + 4, tensors={}), EXPECTED)
    for part in ("cycle is 1", "after 9 updates", "count, x0 is missing"):
        assert part in str(error.value)


def test_samples_may_be_as_old_as_the_run_allows() -> None:
    allowed = replace(EXPECTED, versions=range(4, 6))
    for versions in ([4, 4, 4], [4, 5, 4]):
        check_external(replace(GOOD, versions=torch.tensor(versions)), allowed)
    with pytest.raises(TrainingError, match="after 3, 5 updates, wanted 4 to 5"):
        check_external(replace(GOOD, versions=torch.tensor([5, 3, 5])), allowed)
