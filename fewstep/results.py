"""How evaluations are written down: rows, a JSON file and a table."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fewstep.evaluation import SampleMetrics


def result_row(
    model: str, steps: int, nfe: int, seconds: float, metrics: SampleMetrics
) -> dict[str, Any]:
    """One line of results: a model, its sampling steps, network calls per sample, time, figures."""
    row = {"model": model, "steps": steps, "nfe": nfe, **metrics.as_dict(), "seconds": seconds}
    row["class_balance"] = row.pop("class_balance")  # last
    return row


def evaluation_document(rows: Sequence[Mapping[str, Any]], floor: SampleMetrics) -> dict[str, Any]:
    """Rows of `result_row` and the floor in the form of an evaluation file."""
    return {"results": [dict(row) for row in rows], "floor": floor.as_dict()}


def write_evaluation(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a document as strict JSON (null for NaN and infinities), atomically, making folders."""
    finite = json.loads(json.dumps(document), parse_constant=lambda _: None)
    text = json.dumps(finite, indent=2, allow_nan=False) + "\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def evaluation_table(document: Mapping[str, Any]) -> Table:
    """A document as a table for the terminal: a line per result, and the floor below."""
    columns = ["model", "steps", "nfe", *document["floor"], "seconds"]
    table = Table(title="Evaluation")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name == "model" else "right")
    for row in [*document["results"], {"model": "floor", **document["floor"]}]:
        cells = ("-" if (value := row.get(name)) is None else value for name in columns)
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells))
    return table
