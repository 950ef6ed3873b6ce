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


def printed(table, width):
    """Words of each line of the table: the headers, then the rows; without title and caption."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line.strip()) == {"─"})
    caption = next(i for i, line in enumerate(lines) if line.startswith("NFE:"))
    return [line.split() for line in lines[rule - 1 : caption] if set(line.strip()) != {"─"}]


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
    assert table.row_count == 3
    head, *words = printed(table, width=200)
    assert " ".join(head) == "model steps NFE FD KD prec. rec. dens. cov. acc. bal. s"
    assert [word[0] for word in words] == ["student", "teacher", "floor"]
    assert " ".join(words[0]) == "student 4 4 1.5 0.25 0.5 0.75 0.9 0.8 - 0.01 0.125"
    assert " ".join(words[2]) == "floor - - 1.5 0.25 0.5 0.75 0.9 0.8 0.99 0.01 -"


def test_table_fits_a_terminal_of_80_columns():
    metrics = evaluation.SampleMetrics(
        1234.56, 0.000123456, 0.98765, 0.87654, 1.02345, 0.76543, 0.65432, 0.0123456
    )
    rows = [results.result_row("student_shared", 50, 100, 12.3456, metrics)]
    table = results.evaluation_table(results.evaluation_document(rows, metrics))
    _, row, floor = printed(table, width=80)
    figures = "1235 1.23e-4 0.988 0.877 1.02 0.765 0.654 0.0123"
    assert " ".join(row) == f"student_shared 50 100 {figures} 12.3"
    assert " ".join(floor) == f"floor - - {figures} -"


def test_table_wraps_names_before_it_cuts_numbers():
    rows = [results.result_row("a" * 40, 4, 4, 0.125, METRICS)]
    table = results.evaluation_table(results.evaluation_document(rows, METRICS))
    _, first, *more, _ = printed(table, width=80)
    assert " ".join(first[1:]) == "4 4 1.5 0.25 0.5 0.75 0.9 0.8 0.99 0.01 0.125"
    assert "".join([first[0], *(word for line in more for word in line)]) == "a" * 40
