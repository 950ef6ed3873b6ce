import dataclasses
import io
import json
import math

import pytest
import torch
from rich.console import Console

from fewstep import evaluation, results

FIGURES = [
    "frechet_distance",
    "kernel_distance",
    "precision",
    "recall",
    "density",
    "coverage",
    "class_accuracy",
    "class_balance",
]

METRICS = evaluation.SampleMetrics(1.5, 0.25, 0.5, 0.75, 0.9, 0.8, 0.99, 0.01)


def document(metrics=METRICS):
    row = results.result_row("student", 4, 4, 0.125, metrics)
    return results.evaluation_document([row, {**row, "model": "teacher"}], METRICS)


def test_document_has_exactly_the_agreed_form(tmp_path):
    path = tmp_path / "new" / "evaluation.json"
    results.write_evaluation(path, document())
    figures = dict(zip(FIGURES, (1.5, 0.25, 0.5, 0.75, 0.9, 0.8, 0.99, 0.01), strict=True))
    row = {"model": "student", "steps": 4, "nfe": 4, "seconds": 0.125, **figures}
    assert json.loads(path.read_text()) == {
        "results": [row, {**row, "model": "teacher"}],
        "floor": figures,
    }
    *settings, seconds, balance = document()["results"][0]
    assert settings == ["model", "steps", "nfe", *FIGURES[:7]]
    assert (seconds, balance) == ("seconds", "class_balance")


def test_missing_and_non_finite_figures_are_null(tmp_path):
    metrics = dataclasses.replace(
        METRICS, density=math.nan, coverage=math.inf, recall=-math.inf, class_accuracy=None
    )
    path = tmp_path / "evaluation.json"
    results.write_evaluation(path, document(metrics))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)["results"][0]
    assert {key for key, value in row.items() if value is None} == {
        "density",
        "coverage",
        "recall",
        "class_accuracy",
    }


@pytest.mark.parametrize("failing", ["document", "rename"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, failing):
    path = tmp_path / "evaluation.json"
    results.write_evaluation(path, document())
    before = path.read_text()
    changed = document()
    changed["results"][0]["model"] = torch.zeros(2) if failing == "document" else "other"
    if failing == "rename":

        def refuse(self, target):
            assert json.loads(self.read_text())["results"][0]["model"] == "other", "complete"
            raise OSError("no space")

        monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises((TypeError, OSError)):
        results.write_evaluation(path, changed)
    assert path.read_text() == before
    assert [item.name for item in tmp_path.iterdir()] == ["evaluation.json"]


def test_table_has_a_line_per_result_and_the_floor_last():
    metrics = dataclasses.replace(METRICS, class_accuracy=None)
    table = results.evaluation_table(document(metrics))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    assert table.row_count == 3
    words = [[word.strip() for word in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [word[0] for word in words] == ["student", "teacher", "floor"]
    assert " ".join(words[0]) == "student 4 4 1.5 0.25 0.5 0.75 0.9 0.8 - 0.01 0.125"
    assert " ".join(words[2]) == "floor - - 1.5 0.25 0.5 0.75 0.9 0.8 0.99 0.01 -"
