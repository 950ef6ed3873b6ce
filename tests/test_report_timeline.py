"""The timeline on a run's page: its picture, its table, and what a damaged trace does to them."""

import io
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from fewstep.figures import timeline
from fewstep.figures.theme import DARK, LIGHT, Theme
from fewstep.figures.timeline import KIND_STYLES, MAX_RANKS, steady_cycles, timeline_picture
from fewstep.report import ReportRun, write_report
from fewstep.training.timeline import KINDS, Kind, Span, Timeline

EPOCH = 1_764_453_600.0


def span(lane: str, kind: Kind, start: float, seconds: float, cycle: int = 1) -> Span:
    return Span(kind, lane, kind, cycle, EPOCH + start, seconds)


def run_of(cycles: range, ranks: int = 2, rollouts: int = 2, critic: str = "critic") -> list[Span]:
    """Cycles of 10 seconds: rollouts, five fake_score phases, scoring, student, push."""
    spans = []
    for cycle in cycles:
        at = 10.0 * cycle
        spans += [span(f"rollout/{i}", "rollout", at, 2.5, cycle) for i in range(rollouts)]
        for rank in range(ranks):
            lane = f"{critic}/{rank}"
            spans += [
                Span(f"fake_score/{k}", lane, "train", cycle, EPOCH + at + 2.5 + k, 1.0)
                for k in range(5)
            ]
            spans.append(span(lane, "score", at + 7.5, 0.8, cycle))
            spans.append(span(f"actor/{rank}", "train", at + 8.3, 1.5, cycle))
        spans.append(Span("push", "actor/0", "push", cycle, EPOCH + at + 9.8, 0.1, 5_000_000))
        spans.append(span("driver", "wait", at, 2.5, cycle))
    return spans


def where(png: bytes, kind: Kind, column: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pixels of a kind's colour, below the legend."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    colour = np.round(np.array(to_rgb(KIND_STYLES[kind][column])) * 255)
    rows, columns = np.nonzero((abs(pixels - colour) <= 2).all(-1))
    below = rows > 80
    return rows[below], columns[below]


@pytest.mark.parametrize(("page", "column"), [("light", 1), ("dark", 2)])
def test_bars_lie_where_their_time_is(page: str, column: int) -> None:
    spans = [
        span("critic/0", "train", 0, 6),
        span("critic/0", "score", 6, 3),
        span("critic/0", "push", 10, 0),
        span("rollout/0", "rollout", 9, 3),
    ]
    picture = timeline_picture("run", spans)
    assert picture is not None
    drawn = {kind: where(getattr(picture, page), kind, column) for kind in ("train", "score")}
    drawn |= {kind: where(getattr(picture, page), kind, column) for kind in ("push", "rollout")}
    left = {kind: int(columns.min()) for kind, (_, columns) in drawn.items()}
    right = {kind: int(columns.max()) for kind, (_, columns) in drawn.items()}
    second = (right["rollout"] - left["train"]) / 12
    for kind, start, end in (("train", 0, 6), ("score", 6, 9), ("rollout", 9, 12)):
        assert left[kind] - left["train"] == pytest.approx(start * second, abs=4)
        assert right[kind] - left["train"] == pytest.approx(end * second, abs=4)
    # What took no time is still seen.
    assert left["push"] - left["train"] == pytest.approx(10 * second, abs=4)
    assert 1 <= right["push"] - left["push"] <= 4
    # One row for the critic, and the rollout workers' below.
    assert abs(drawn["train"][0].max() - drawn["score"][0].max()) <= 1
    assert drawn["rollout"][0].min() > drawn["train"][0].max()


def test_spans_too_short_to_see_are_seen() -> None:
    spans = [span("driver", "push", i / 2, i * 0.002) for i in range(21)]
    picture = timeline_picture("run", [*spans, span("a/0", "train", 0, 12)])
    assert picture is not None
    columns = np.unique(where(picture.light, "push")[1])
    assert 1 + np.count_nonzero(np.diff(columns) > 1) == len(spans)


def test_shorter_spans_lie_on_top_of_those_around_them() -> None:
    inner, outer = span("a/0", "hand_off", 4, 2), span("a/0", "train", 0, 10)
    for spans in ([inner, outer], [outer, inner]):
        picture = timeline_picture("run", spans)
        assert picture is not None
        columns = set(where(picture.light, "hand_off")[1])
        assert len(columns) > 300


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    "spans",
    [
        run_of(range(8, 11)),
        run_of(range(1200, 1203), ranks=1, rollouts=1),
        run_of(range(1), ranks=16, rollouts=16, critic="a_critic_of_a_very_long_name"),
        [*run_of(range(1)), *(span("driver", "save", 10 + i / 10, 0.1, i) for i in range(1, 9))],
        [span("driver", "push", 0, 0)],
        [span(f"group_{kind}/0", kind, i, 1) for i, kind in enumerate(KINDS)],
    ],
    ids=["two", "one", "many", "short cycles", "a moment", "all kinds"],
)
def test_labels_are_within_the_picture_and_do_not_overlap(spans: list[Span], theme: Theme) -> None:
    lanes = timeline.order_lanes(spans)
    origin = min(s.start for s in spans)
    moved = [timeline.replace(s, start=s.start - origin) for s in spans]
    rows = timeline._place(lanes)
    height = round(timeline.TOP + rows.total + timeline.BOTTOM)
    figure = Figure(figsize=(timeline.WIDTH / 96, height / 96), dpi=96)
    canvas = FigureCanvasAgg(figure)
    timeline._draw(figure, theme, moved, rows, height)
    canvas.draw()
    renderer = canvas.get_renderer()
    axes, (low, high) = figure.axes[0], figure.axes[0].get_xlim()
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    texts = [*axes.texts, *figure.legends[0].get_texts(), axes.xaxis.label]
    texts += [label for at, label in ticks if low <= at <= high]
    boxes = {text: text.get_window_extent(renderer) for text in texts}
    assert len(boxes) > 3
    for text, box in boxes.items():
        assert box.x0 >= 0, text
        assert box.x1 <= timeline.WIDTH, text
        assert box.y0 >= 0, text
        assert box.y1 <= height, text
    for (one, a), (two, b) in combinations(boxes.items(), 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        # Boxes are a little higher than letters.
        assert wide < 1 or high < 3, (one, two)


def test_names_are_written_where_there_is_room() -> None:
    spans = run_of(range(8, 11))
    written = {text for _, text in timeline._names(spans, pixel=30 / 820)}
    assert written == {"0", "1", "2", "3", "4", "rollout", "wait", "train"}
    assert "fake_score/3" in {text for _, text in timeline._names(spans, pixel=10 / 820)}


def test_name_that_something_lies_on_is_left_out() -> None:
    outer = span("a/0", "train", 0, 10)
    names = timeline._names([outer, span("a/0", "push", 4, 0.2)], pixel=0.01)
    assert [text for _, text in names] == []
    # Clocks let neighbours overlap by a hair.
    names = timeline._names([outer, span("a/0", "push", 9.995, 0.2)], pixel=0.01)
    assert [text for _, text in names] == ["train"]


def test_steady_cycles_are_the_latest_without_saving_or_validation() -> None:
    spans = [span("a/0", "train", c, 1, c) for c in range(1, 13)]
    assert steady_cycles(spans) == [10, 11, 12]
    assert steady_cycles(spans, 2) == [11, 12]
    spans.append(span("driver", "save", 12, 1, 12))
    spans.append(span("a/0", "validation", 9, 1, 9))
    assert steady_cycles(spans) == [6, 7, 8]
    assert steady_cycles([span("driver", "save", c, 1, c) for c in (1, 2, 8, 9)]) == [8, 9]
    assert steady_cycles([span("driver", "save", c, 1, c) for c in range(9)]) == [6, 7, 8]
    assert steady_cycles([]) == []


def test_picture_says_what_it_leaves_out_and_how_busy_groups_are() -> None:
    assert timeline_picture("run", []) is None
    picture = timeline_picture("run", run_of(range(30), ranks=64, rollouts=1))
    assert picture is not None
    assert picture.name == "run_timeline"
    assert f"the first {MAX_RANKS} ranks" in picture.caption
    assert "Cycles 27 to 29" in picture.alt
    assert "rollout (1 row) busy 25%" in picture.alt
    assert f"critic ({MAX_RANKS} rows) busy 58%" in picture.alt
    assert picture.height < 900


def make_run(directory: Path, cycles: int = 24) -> ReportRun:
    """A run directory with a timeline and its series "timing"."""
    directory.mkdir()
    trace = Timeline(directory / "timeline.json")
    lines: list[dict[str, Any]] = []
    for cycle in range(1, cycles + 1):
        trace.extend(run_of(range(cycle, cycle + 1)))
        values = trace.cycle_values(cycle)
        lines.append({"series": "timing", "cycle": cycle, "step": cycle, "time": 1.0, **values})
    trace.write()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    return ReportRun(directory.name, directory)


def page(out: Path, *runs: ReportRun) -> str:
    written = write_report(out, title="t", runs=runs, evaluation=None, grids={}, labels=[])
    return written[0].read_text(encoding="utf-8")


def table(text: str) -> dict[str, list[str]]:
    """Rows of the timeline's table by their head."""
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    rows = {}
    for row in body.split("<tr>")[1:]:
        head, *cells = row.replace("</th>", "<td>").split("<td>")
        cells = [cell.partition("<")[0] for cell in cells if cell.strip()]
        rows[head.partition(">")[2].strip()] = cells
    return rows


def test_page_shows_where_the_time_went(tmp_path: Path) -> None:
    text = page(tmp_path / "out", make_run(tmp_path / "student"))
    assert '<h4 id="timeline-student">Timeline</h4>' in text
    assert "Mean over 24 logged cycles" in text
    assert "chrome://tracing" in text
    assert "Perfetto" in text
    assert (tmp_path / "out/student_timeline.png").is_file()
    assert table(text) == {
        "the whole cycle": ["9.9", "", ""],
        "rollouts": ["2.5", "25%", ""],
        "critic, training": ["5", "51%", ""],
        "actor, training": ["1.5", "15%", ""],
        "scoring": ["0.8", "8%", ""],
        "weight push": ["0.1", "1%", "5\u00a0MB"],
        "rollout, idle": ["7.4", "75%", ""],
        "critic, idle": ["4.1", "41%", ""],
        "actor, idle": ["8.35", "84%", ""],
    }


def test_runs_have_timelines_of_their_own(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, cycles=3) for name in ("a", "b")]
    text = page(tmp_path / "out", *runs)
    assert {"a_timeline.png", "b_timeline.png"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert text.count("Timeline</h4>") == 2


def test_run_without_a_timeline_has_no_section(tmp_path: Path) -> None:
    run = make_run(tmp_path / "student")
    (run.path / "timeline.json").unlink()
    text = page(tmp_path / "out", run)
    assert "Timeline" not in text
    assert "<table>" not in text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "timeline.json is no JSON, or cut off"),
        (lambda text: text.replace('"score"', '"scare"'), "cat is &#39;scare&#39;"),
        (lambda _: '{"traceEvents": []}', "timeline.json holds no cycle yet."),
    ],
)
def test_damaged_timeline_is_a_note_and_the_table_stays(tmp_path: Path, damage, said) -> None:
    run = make_run(tmp_path / "student")
    file = run.path / "timeline.json"
    file.write_text(damage(file.read_text()))
    text = page(tmp_path / "out", run)
    assert said in text
    assert str(tmp_path) not in text
    assert "chrome://tracing" not in text
    assert table(text)["the whole cycle"] == ["9.9", "", ""]
    assert not (tmp_path / "out/student_timeline.png").exists()


def test_a_group_that_a_cycle_does_not_name_was_idle_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "student")
    lines: list[dict[str, Any]] = [
        {"series": "timing", "cycle": 1, "seconds": 2.0},
        {
            "series": "timing",
            "cycle": 2,
            "seconds": 6.0,
            "wait_b_seconds": 4.0,
            "train_b_seconds": 2,
        },
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "metrics.jsonl").write_text(text)
    assert table(page(tmp_path / "out", run)) == {
        "the whole cycle": ["4", "", ""],
        "b, training": ["1", "25%", ""],
        "b, idle": ["3", "75%", ""],
    }


def test_timing_that_is_damaged_or_missing_leaves_the_picture(tmp_path: Path) -> None:
    run = make_run(tmp_path / "student")
    lines: list[dict[str, Any]] = [
        {"series": "timing", "cycle": 1, "seconds": None, "score_seconds": "long", "odd_bytes": 0},
        {"series": "timing", "cycle": 2, "seconds": 4.0, "new_seconds": 1.0, "odd_bytes": 2e10},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "metrics.jsonl").write_text(text)
    assert table(page(tmp_path / "out", run)) == {
        "the whole cycle": ["4", "", ""],
        "new": ["1", "25%", ""],
        "odd": ["–", "", "20\u00a0GB"],
    }
    (run.path / "metrics.jsonl").unlink()
    text = page(tmp_path / "out", run)
    assert "<table>" not in text
    assert "Timeline</h4>" in text
