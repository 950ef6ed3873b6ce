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
from fewstep.data.settings import BuiltInData, ImageData, PromptData
from fewstep.errors import UserError
from fewstep.methods.method import SamplerSpec
from fewstep.sampling import Samples
from fewstep.source import Source


def source(path: Path, value: float = 0.0, data: Any = None) -> Source:
    """Gives images of one value."""
    path.mkdir(parents=True)
    line = {"series": "student", "cycle": 1, "step": 1, "loss": 0.5}
    (path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    data = data or SimpleNamespace(
        name="digits",
        load=lambda: Dataset(torch.rand(64, 1, 8, 8)),
        facts=lambda: {"name": "digits"},
        content=lambda: None,
    )
    made: Any = SimpleNamespace(
        name=path.name,
        path=path,
        few_step=True,
        data=data,
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


def test_a_source_without_finite_samples_costs_the_others_nothing(tmp_path: Path) -> None:
    sources = [source(tmp_path / name, v) for name, v in (("broken", float("nan")), ("good", 0.5))]
    measured: dict[str, Any] = {"samples": 20, "features": "raw"}
    measured["dataset"] = Dataset(torch.rand(64, 1, 8, 8))
    document, images = evaluate_sources(sources, **measured)
    assert [row["model"] for row in document["results"]] == ["broken", "good"]
    assert ["frechet_distance" in row for row in document["results"]] == [False, True]
    alone, _ = evaluate_sources(sources[1:], **measured)
    assert document["results"][1] == alone["results"][0]
    page = write_comparison(tmp_path / "out", sources, document, images).read_text()
    assert "broken" in page
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == document


IMAGES = {"files": ["a", "b"], "encoded": "one", "validation_items": 4}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"files": ["a", "c"]}, r"data.files is \['a', 'b'\] of .*one and \['a', 'c'\] of .*two"),
        ({"validation_items": 5}, r"data.validation_items is 4 of .*one and 5 of .*two"),
        ({"background": (0, 0, 0)}, r"data.background is \[255, 255, 255\] of .*one"),
        ({"name": "prompts"}, r"data.name is 'images' of .*one and 'prompts' of .*two"),
        ({"encoded": "two", "dtype": "float32", "batch_size": 1}, None),
    ],
)
def test_sources_of_other_images_or_prompts_are_not_compared(
    tmp_path: Path, change: dict[str, Any], told: str | None
) -> None:
    one = source(tmp_path / "one", data=ImageData(**IMAGES))
    kind = PromptData if change.get("name") == "prompts" else ImageData
    two = source(tmp_path / "two", data=kind(**{**IMAGES, **change}))
    real = Dataset(torch.rand(64, 1, 8, 8))
    if told is None:
        document, _ = evaluate_sources([one, two], samples=20, features="raw", dataset=real)
        assert len(document["results"]) == 2
        return
    for sources in ([one, two], [source(tmp_path / "x", data=BuiltInData()), one, two]):
        with pytest.raises(UserError, match=f"were trained on different data: {told}"):
            evaluate_sources(sources, samples=20, features="raw", dataset=real)


@pytest.mark.parametrize(("files", "content", "alike"), [("a", "y", False), ("./a", "x", True)])
def test_data_that_are_there_are_known_by_their_content(
    tmp_path: Path, files: str, content: str, alike: bool
) -> None:
    sources = [
        source(
            tmp_path / name,
            data=SimpleNamespace(
                name="images",
                facts=lambda files=files: {"name": "images", "files": files},
                content=lambda sha256=sha256: {"files": [sha256]},
            ),
        )
        for name, files, sha256 in (("one", "a", "x"), ("two", files, content))
    ]
    real = Dataset(torch.rand(64, 1, 8, 8))
    if alike:
        assert evaluate_sources(sources, samples=20, features="raw", dataset=real)
        return
    with pytest.raises(UserError, match=r"one and .*two have files of the same names and other"):
        evaluate_sources(sources, samples=20, features="raw", dataset=real)


def test_what_a_later_source_lacks_is_said_before_the_first_is_sampled(tmp_path: Path) -> None:
    def refuse(count: int) -> None:
        raise UserError("no prompts")

    one, two = source(tmp_path / "one"), source(tmp_path / "two")
    one.sample, two.conditions = pytest.fail, refuse  # type: ignore[misc, assignment]
    with pytest.raises(UserError, match="no prompts"):
        evaluate_sources([one, two], samples=20, features="raw")


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
