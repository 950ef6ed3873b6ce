"""What the report says of a training run, gathered from its directory."""

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewstep.errors import UserError
from fewstep.figures import (
    Array,
    Picture,
    Records,
    curve,
    gradient_norm_picture,
    latents_picture,
    loss_picture,
    number,
    short,
    timeline_picture,
    validation_picture,
)
from fewstep.training.timeline import read_trace

TIMING_NAMES = {
    "rollout": "rollouts",
    "train": "training",
    "score": "scoring",
    "hand_off": "hand-over",
    "push": "weight push",
    "offload": "offload",
    "save": "saving",
    "validation": "validation",
    "driver": "driver alone",
    "wait": "idle",
}
"""Names of the series "timing", in the order of the table; "train" and "wait" name a group too."""


@dataclass(frozen=True)
class ReportRun:
    """One training run: a directory with metrics.jsonl and recipe.yaml.

    Attributes:
        name: what the page calls it.
        path: of the directory.
        slug: starts the names of its pictures' files; by default made from the name.
    """

    name: str
    path: Path
    slug: str | None = None


@dataclass(frozen=True)
class TimelineView:
    """Where the time of a run's cycles went.

    Attributes:
        picture: of a few cycles; None where the trace has none, or is damaged.
        rows: what, seconds a cycle, share of the cycle, and bytes a cycle: means, in words.
        cycles: how many cycles the means are over.
        problem: why the trace was left out, if it was.
    """

    picture: Picture | None
    rows: list[tuple[str, str, str, str]]
    cycles: int
    problem: str | None


@dataclass(frozen=True)
class RunView:
    """What the page shows of one run; `timeline` where it has a timeline.json."""

    name: str
    anchor: str
    facts: list[str]
    notes: list[str]
    pictures: list[Picture]
    timeline: TimelineView | None
    recipe: str | None


def read_metrics(path: Path) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Lines of a metrics.jsonl file by series, and how many lines could not be read.

    Where a resumed run went back to an earlier cycle, the lines it overtook are dropped; warnings
    are kept.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    unreadable = 0
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in filter(str.strip, text.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("series"), str):
            unreadable += 1
            continue
        earlier = records.setdefault(record["series"], [])
        cycle = number(record.get("cycle"))
        if record["series"] not in ("warning", "reference") and cycle is not None:
            while earlier and (number(earlier[-1].get("cycle")) or 0) > cycle:
                earlier.pop()
        earlier.append(record)
    return records, unreadable


def slug(name: str) -> str:
    """A name that is safe in a file name and in an HTML id."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "unnamed"


def distinct_runs(named: Iterable[tuple[str, Path]]) -> list[ReportRun]:
    """Runs of these names and directories, with slugs numbered where two would be alike.

    They are alike too where only the case differs: not every disk tells such files apart.
    """
    runs: list[ReportRun] = []
    named = list(named)
    taken = {slug(name).lower() for name, _ in named}
    seen: set[str] = set()
    for name, path in named:
        unique, count = slug(name), 1
        while unique.lower() in (seen if count == 1 else taken):
            count += 1
            unique = f"{slug(name)}_{count}"
        seen.add(unique.lower())
        taken.add(unique.lower())
        runs.append(ReportRun(name, path, unique))
    return runs


def view_run(run: ReportRun, warnings: list[str]) -> RunView:
    """Gather one run; what a reader must not miss is appended to `warnings`."""
    source = run.path / "metrics.jsonl"
    records, unreadable = read_metrics(source)
    warnings += _warnings(run.name, records)
    name = run.slug or slug(run.name)
    drawn = (
        loss_picture(name, records),
        gradient_norm_picture(name, records),
        latents_picture(name, records),
        validation_picture(name, records),
    )
    notes = []
    if not records:
        notes.append("No metrics were found for this run.")
    if unreadable:
        lines = "1 line" if unreadable == 1 else f"{unreadable} lines"
        notes.append(f"{lines} of metrics.jsonl could not be read and were left out.")
    recipe = run.path / "recipe.yaml"
    return RunView(
        name=run.name,
        anchor=name,
        facts=_facts(records),
        notes=notes,
        pictures=[picture for picture in drawn if picture is not None],
        timeline=_timeline(name, run.path / "timeline.json", records),
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else None,
    )


def _timeline(name: str, file: Path, records: Records) -> TimelineView | None:
    if not file.is_file():
        return None
    picture, problem = None, None
    try:
        picture = timeline_picture(name, read_trace(file))
    except UserError as error:
        problem = f"Its picture was left out: {str(error).replace(str(file), file.name)}."
    else:
        if picture is None:
            problem = f"{file.name} holds no cycle yet."
    timing = records.get("timing", ())
    return TimelineView(picture, _timing_rows(timing), len(timing), problem)


def _timing_rows(timing: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Means of the series "timing" over its cycles, without what never took time or room."""
    means = {}
    cycles = [record for record in timing if number(record.get("seconds")) is not None]
    for key in dict.fromkeys(key for cycle in cycles for key in cycle):
        # A cycle does not name a group that had nothing to do: that one was idle all the time.
        idle = key.startswith("wait_")
        values = [number(c.get(key, c["seconds"] if idle else 0.0)) or 0.0 for c in cycles]
        if key.endswith(("seconds", "_bytes")) and any(values):
            means[key] = statistics.fmean(values)
    whole = means.pop("seconds", 0.0)
    rows = [("the whole cycle", short(whole), "", "")] if whole else []
    names = dict.fromkeys(key.rpartition("_")[0] for key in means)
    for name in sorted(names, key=_timing_position):
        seconds = means.get(f"{name}_seconds")
        share = f"{seconds / whole:.0%}" if whole and seconds is not None else ""
        moved = means.get(f"{name}_bytes")
        room = "" if moved is None else _size(moved)
        rows.append((_timing_name(name), short(seconds), share, room))
    return rows


def _timing_position(key: str) -> int:
    """Where a key of the series "timing" comes in the table, about as in a cycle."""
    order = list(TIMING_NAMES)
    kind = key if key in order else key.partition("_")[0]
    return order.index(kind) if kind in order else len(order)


def _timing_name(key: str) -> str:
    """Words for a key of the series "timing", without its unit."""
    kind, _, group = key.partition("_")
    if group and kind in ("train", "wait"):
        return f"{group}, {TIMING_NAMES[kind]}"
    return TIMING_NAMES.get(key, key.replace("_", " "))


def _size(count: float) -> str:
    """A number of bytes in words, with decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{short(count)}\u00a0{unit}"
        count /= 1000
    return f"{short(count)}\u00a0TB"


def _warnings(run: str, records: Records) -> list[str]:
    """Warning lines, equal ones counted, and losses that were not finite."""
    cycles: dict[str, list[object]] = {}
    for record in records.get("warning", ()):
        message = str(record.get("message", "warning without a message"))
        cycles.setdefault(message, []).append(record.get("cycle", "?"))
    said = []
    for message, at in cycles.items():
        when = f"cycle {at[0]}" if len(at) == 1 else f"{len(at)} times, cycles {at[0]} to {at[-1]}"
        said.append(f"{run}: {message} ({when})")
    for role in ("student", "fake_score", "discriminator"):
        losses = [record["loss"] for record in records.get(role, ()) if "loss" in record]
        bad = sum(number(loss) is None for loss in losses)
        if bad:
            said.append(f"{run}: {role} loss is not finite in {bad} of {len(losses)} steps")
    return said


def _facts(records: Records) -> list[str]:
    facts = []
    cycles, losses = curve(records, "student", "loss")
    if len(cycles):
        name = "final student loss" if records.get("fake_score") else "final loss"
        facts += [f"{cycles[-1]:,.0f} cycles", f"{name} {short(_final(losses))}"]
    _, distances = curve(records, "validation", "frechet_distance")
    if len(distances):
        facts.append(f"best validation Fréchet distance {short(float(distances.min()))}")
    _, seconds = curve(records, "run", "seconds_per_cycle")
    if len(seconds):
        facts.append(f"{short(statistics.median(seconds.tolist()))} s a cycle")
    return facts


def _final(values: Array) -> float:
    """Mean of the last twentieth of the values."""
    return float(values[-max(1, len(values) // 20) :].mean())
