"""How evaluations are written down: rows, a JSON file and a table."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fewstep.evaluation import SampleMetrics

HEADERS = {
    "model": "model",
    "steps": "steps",
    "nfe": "NFE",
    "frechet_distance": "FD",
    "kernel_distance": "KD",
    "precision": "prec.",
    "recall": "rec.",
    "density": "dens.",
    "coverage": "cov.",
    "class_accuracy": "acc.",
    "class_balance": "bal.",
    "clip_score": "CLIP",
    "seconds": "s",
}
CAPTION = (
    "NFE: network calls a sample. Lower is better: FD and KD, Fréchet and kernel distance; "
    "bal., distance of class frequencies; s, seconds in the sampler. Higher is better: "
    "precision, recall, density, coverage, class accuracy. Floor: half of the real images."
)


def result_row(
    model: str,
    steps: int,
    nfe: int,
    seconds: float,
    metrics: SampleMetrics | None,
    clip_score: float | None = None,
) -> dict[str, Any]:
    """One line of results: a model, its sampling steps, network calls per sample, time, figures."""
    row: dict[str, Any] = {"model": model, "steps": steps, "nfe": nfe}
    row |= {**(metrics.as_dict() if metrics is not None else {}), "seconds": seconds}
    if "class_balance" in row:
        row["class_balance"] = row.pop("class_balance")  # last
    return row if clip_score is None else {**row, "clip_score": clip_score}


def evaluation_document(
    rows: Sequence[Mapping[str, Any]], floor: SampleMetrics | None
) -> dict[str, Any]:
    """Rows of `result_row` and the floor, if there is one, in the form of an evaluation file."""
    figures = floor.as_dict() if floor is not None else {}
    return {"results": [dict(row) for row in rows], "floor": figures}


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
    """A document as a table for the terminal: a line per result, and the floor below.

    Fits 80 columns; where room is short, long model names wrap, and numbers stay whole.
    """
    # One column of space between cells, no frame.
    table = Table(
        title="Evaluation",
        caption=CAPTION,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    scored = any("clip_score" in row for row in document["results"])
    columns = ["model", "steps", "nfe", *document["floor"], *["clip_score"] * scored, "seconds"]
    for name in columns:
        head = HEADERS.get(name, name.replace("_", " "))
        if name == "model":
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    floor = [{"model": "floor", **document["floor"]}] if document["floor"] else []
    for row in [*document["results"], *floor]:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def _cell(value: object) -> str:
    """A float to three significant digits, in as few characters as that takes."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if 999.5 <= abs(value) < 1e6:
        return f"{value:.0f}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-")
    return f"{value:.3g}"
