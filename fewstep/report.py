"""One self-contained page about a project's runs, with its pictures beside it as PNG files."""

import base64
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from fewstep import figures
from fewstep.figures import metric_name, number, short
from fewstep.report_data import ReportRun, read_metrics, slug, view_run

__all__ = ["ReportRun", "read_metrics", "slug", "write_report"]

TEACHER = "teacher"
METRICS = ("frechet_distance", "kernel_distance", "precision", "recall", "density", "coverage")
COLUMNS = ("steps", "nfe", *METRICS, "class_accuracy", "seconds")
LOWER_IS_BETTER = (*figures.LOWER_IS_BETTER, "seconds")


@dataclass(frozen=True)
class Headline:
    """The student against the teacher: one sentence and the few numbers behind it."""

    sentence: str
    tiles: list[tuple[str, str, str]] = field(default_factory=list)


def write_report(
    out_dir: Path,
    *,
    title: str,
    runs: Sequence[ReportRun],
    evaluation: Mapping[str, Any] | None,
    grids: Mapping[str, Mapping[str, Tensor]],
    labels: Sequence[str] | Mapping[str, Sequence[str]],
) -> list[Path]:
    """Write report.html and its PNG files; the page needs none of the files beside it.

    Args:
        out_dir: Directory to write into; made if missing.
        title: Heading of the page.
        runs: Training runs, in the order to show them.
        evaluation: `{"results": [...], "floor": {...}}`, or `None` before an evaluation; with
            "held_out", results on prompts that were not trained on.
        grids: Images [N, C, H, W] in [-1, 1] by grid name and row label. Column i starts from the
            same noise and class or prompt in every row.
        labels: Class or prompt of each column; by grid name where they differ.

    Returns:
        Paths of the files written, the page first.
    """
    evaluation = evaluation or {}
    results, held_out = (
        [row for row in evaluation.get(key) or [] if isinstance(row, Mapping)]
        for key in ("results", "held_out")
    )
    floor = evaluation.get("floor") or {}
    colours = _colours([*results, *held_out])
    quality = figures.quality_picture(results, floor, colours)
    by_grid = labels if isinstance(labels, Mapping) else dict.fromkeys(grids, labels)
    drawn = [figures.grid_picture(slug(name), rows, by_grid[name]) for name, rows in grids.items()]
    shown = [grid for grid in drawn if grid is not None]
    warnings: list[str] = []
    views = [view_run(run, warnings) for run in runs]

    pictures = [picture for picture, _ in shown] + [p for view in views for p in view.pictures]
    pictures += [v.timeline.picture for v in views if v.timeline and v.timeline.picture]
    pictures += [quality] if quality else []
    names = [picture.name for picture in pictures]
    if clash := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two pictures of the report would share a file: {sorted(clash)}")

    page = _render(
        title=title,
        headline=_headline(results),
        warnings=warnings,
        grids=shown,
        table=_table(results, floor, colours),
        held_out=_table(held_out, {}, colours),
        conditions=_conditions(evaluation),
        quality=quality,
        runs=views,
        written=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        _write(out_dir / f"{picture.name}.png", picture.light)
    _write(out_dir / "report.html", page.encode())
    return [out_dir / "report.html", *(out_dir / f"{name}.png" for name in names)]


def _colours(results: Iterable[Mapping[str, Any]]) -> dict[str, int | None]:
    """Colour index of each evaluated model, in order; the teacher's is `None`."""
    models = list(dict.fromkeys(str(row.get("model", "unnamed")) for row in results))
    others = [model for model in models if model != TEACHER]
    return {model: None if model == TEACHER else others.index(model) for model in models}


def _headline(results: Sequence[Mapping[str, Any]]) -> Headline | None:
    """Compare the first student, at its best number of steps, with the longest teacher."""
    scored = [row for row in results if number(row.get("frechet_distance")) is not None]
    scored = [row for row in scored if number(row.get("steps")) is not None]
    students = [row for row in scored if row.get("model") != TEACHER]
    teachers = [row for row in scored if row.get("model") == TEACHER]
    if not students or not teachers:
        return None
    name = students[0].get("model")
    student = min(
        (row for row in students if row.get("model") == name),
        key=lambda row: (row["frechet_distance"], row["steps"]),
    )
    teacher = max(teachers, key=lambda row: row["steps"])
    cut = next(
        (row for row in teachers if row["steps"] == student["steps"] < teacher["steps"]), None
    )
    return _compare(student, teacher, cut)


def _compare(
    student: Mapping[str, Any], teacher: Mapping[str, Any], cut: Mapping[str, Any] | None
) -> Headline:
    ours, theirs = student["frechet_distance"], teacher["frechet_distance"]
    name = "the student" if student["model"] == "student" else str(student["model"])
    steps = "1 step" if student["steps"] == 1 else f"{student['steps']} steps"
    claims, tiles = [], []
    fast, slow = number(student.get("seconds")), number(teacher.get("seconds"))
    if fast and slow:
        ratio = short(slow / fast)
        claims.append(f"{name} samples {ratio} times as fast")
        tiles.append(
            (
                f"{ratio}×",
                "the teacher's speed",
                f"{short(fast)}\u00a0s against {short(slow)}\u00a0s",
            )
        )
    if theirs > 0:
        ratio = short(ours / theirs)
        subject = "its" if claims else f"{name}'s"
        claims.append(f"{subject} Fréchet distance is {ratio} times the teacher's")
        detail = f"{short(ours)} against {short(theirs)}"
        tiles.append((f"{ratio}×", "the teacher's Fréchet distance", detail))
    calls, teacher_calls = number(student.get("nfe")), number(teacher.get("nfe"))
    if calls and teacher_calls:
        detail = f"{short(teacher_calls)} for the teacher"
        tiles.append((short(calls), "network calls a sample", detail))
    if cut is not None:
        what = f"the teacher's Fréchet distance in {steps}"
        tiles.append((short(cut["frechet_distance"]), what, f"{short(ours)} for {name}"))
    start = f"In {steps} instead of the teacher's {teacher['steps']}, "
    return Headline(start + "; ".join(claims or [f"{name} samples"]) + ".", tiles)


def _table(
    results: Sequence[Mapping[str, Any]],
    floor: Mapping[str, Any],
    colours: Mapping[str, int | None],
) -> dict[str, Any] | None:
    """The evaluation as text: column heads, then a row per result, then the floor."""
    if not results:
        return None
    present = dict.fromkeys(
        key for row in [*results, floor] for key, value in row.items() if number(value) is not None
    )
    keys = [key for key in COLUMNS if key in present]
    keys += [key for key in present if key not in COLUMNS]
    heads = []
    for key in keys:
        known = key in COLUMNS and key not in ("steps", "nfe")
        arrow = ("↓" if key in LOWER_IS_BETTER else "↑") if known else ""
        heads.append((metric_name(key), arrow))
    rows = []
    for row in results:
        model = str(row.get("model", "unnamed"))
        index = colours[model]
        colour = "teacher" if index is None else f"s{index % len(figures.LIGHT.series)}"
        rows.append((model, colour, [_cell(key, row.get(key)) for key in keys]))
    last = [_cell(key, floor.get(key)) for key in keys] if floor else None
    return {"heads": heads, "rows": rows, "floor": last}


def _cell(key: str, value: object) -> str:
    finite = number(value)
    if finite is None:
        return "–"
    fixed = key in ("precision", "recall", "density", "coverage", "class_accuracy")
    return f"{finite:.3f}" if fixed else short(finite)


def _conditions(evaluation: Mapping[str, Any]) -> list[str]:
    """What the evaluation says of itself beside its results, such as the number of samples."""
    plain = {
        key: value for key, value in evaluation.items() if isinstance(value, str | int | float)
    }
    return [
        f"{key.replace('_', ' ')}: {f'{value:,}' if isinstance(value, int) else value}"
        for key, value in plain.items()
    ]


def _render(**values: Any) -> str:
    """Fill the page's template; everything but the pictures' bytes is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["data_uri"] = _data_uri
    template = files("fewstep").joinpath("templates/report.html").read_text(encoding="utf-8")
    page = environment.from_string(template)
    return page.render(light=figures.LIGHT, dark=figures.DARK, **values)


def _data_uri(png: bytes) -> Markup:
    return Markup("data:image/png;base64," + base64.b64encode(png).decode())


def _write(path: Path, content: bytes) -> None:
    """Replace a file at once: a reader sees the old one or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
