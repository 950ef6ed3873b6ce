"""Sources side by side."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fewstep.comparison import evaluate_sources, write_comparison
from fewstep.data.conditions import conditions_in_turn
from fewstep.data.dataset import Dataset
from fewstep.errors import UserError
from fewstep.methods.method import SamplerSpec
from fewstep.sampling import Samples
from fewstep.source import Source


def source(path: Path, value: float = 0.0) -> Source:
    """Gives images of one value."""
    path.mkdir(parents=True)
    line = {"series": "student", "cycle": 1, "step": 1, "loss": 0.5}
    (path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    made: Any = SimpleNamespace(
        name=path.name,
        path=path,
        few_step=True,
        data=SimpleNamespace(name="digits", load=lambda: Dataset(torch.rand(64, 1, 8, 8))),
        items=None,
        roles=SimpleNamespace(model=SimpleNamespace(classes=10), device=torch.device("cpu")),
        conditions=lambda count: conditions_in_turn(10, None, count),
        sampler=lambda steps: SamplerSpec((1.0,), "euler"),
        sample=lambda wanted, *_: Samples(
            torch.full((len(wanted), 1, 8, 8), value), wanted, 0.1, 1
        ),
    )
    return made


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    with pytest.raises(UserError, match="the samples of broken are not finite"):
        evaluate_sources([source(tmp_path / "broken", value)], samples=20, features="raw")


@pytest.mark.parametrize("names", [("a b", "a_b"), ("数字", "手写")])
def test_names_that_are_alike_as_file_names_are_reported(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    sources = [source(tmp_path / name) for name in names]
    rows = [{"model": name, "steps": 1, "nfe": 1, "frechet_distance": 1.0} for name in names]
    images = {f"{name}, 1 step": torch.zeros(16, 1, 8, 8) for name in names}
    page = write_comparison(tmp_path / "out", sources, {"results": rows, "floor": {}}, images)
    assert page.is_file()
    assert all(name in page.read_text(encoding="utf-8") for name in names)
    assert len(list((tmp_path / "out").glob("*_loss.png"))) == 2
