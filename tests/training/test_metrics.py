"""What is written down during a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fewstep.diffusion.draw import Draw
from fewstep.errors import UserError
from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import run_cycle
from fewstep.training.metrics import (
    DriftMonitor,
    JsonLinesSink,
    LoggingHook,
    LoggingSettings,
    Metrics,
    drift_warnings,
    open_metrics,
)
from fewstep.training.phase import PhaseRequest, PhaseResult


class ListSink:
    def __init__(self) -> None:
        self.entries: list[tuple[str, int, int, dict[str, Any]]] = []

    def write(self, series, step, cycle, values) -> None:
        self.entries.append((series, step, cycle, dict(values)))

    def close(self) -> None:
        pass

    def series(self, name: str) -> list[tuple[int, int, dict[str, Any]]]:
        return [(step, cycle, v) for series, step, cycle, v in self.entries if series == name]


@pytest.mark.parametrize("order", ["student_first", "fake_score_first"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_each_role_is_a_series_with_a_counter_of_its_own(build_worker, dmd2, order, warmup) -> None:
    worker, sink = build_worker(dmd2()), ListSink()
    hook = LoggingHook(Metrics([sink]), LoggingSettings(every=1), last_cycle=5)
    for cycle in range(1, 6):
        results = run_cycle(worker, cycle, 2, CycleSettings(order=order, warmup_cycles=warmup))
        hook.after_cycle(cycle, results)
        fresh = next(r for r in results if r.request.role == "fake_score")
        (_, _, run) = sink.series("run")[-1]
        assert run["fake_score_loss_on_fresh_samples"] == fresh.metrics["loss"]
        done = max(cycle - warmup, 0)
        assert run["student_updates_per_fake_update"] == pytest.approx(done / (2 * cycle))
        assert run["seconds_per_cycle"] > 0
    student, fake = sink.series("student"), sink.series("fake_score")
    assert [(s, c) for s, c, _ in student] == [(n, n + warmup) for n in range(1, 6 - warmup)]
    assert [(s, c) for s, c, _ in fake] == [(n, (n + 1) // 2) for n in range(1, 11)]
    for _, _, values in student + fake:
        assert {"loss", "grad_norm", "lr", "updates", "skipped"} <= values.keys()
    for _, _, values in student:
        assert {"sample_mean", "sample_std", "sample_variance"} <= values.keys()


def test_how_far_the_fake_score_lags_is_told_without_a_classifiers_loss() -> None:
    sink, request = ListSink(), PhaseRequest(1, "fake_score/0", "fake_score", "fake_score/0")
    values = {"loss": 3.0, "denoising_loss": 2.0, "updates": 1.0}
    hook = LoggingHook(Metrics([sink]), LoggingSettings(every=1), last_cycle=1)
    hook.after_cycle(1, [PhaseResult(request, True, 1, values)])
    ((_, _, run),) = sink.series("run")
    assert run["fake_score_loss_on_fresh_samples"] == 2.0


def test_interval_and_last_cycle(build_worker, dmd2) -> None:
    worker, sink = build_worker(dmd2()), ListSink()
    hook = LoggingHook(Metrics([sink]), LoggingSettings(every=3), last_cycle=7)
    for cycle in range(1, 8):
        hook.after_cycle(cycle, run_cycle(worker, cycle, 1, CycleSettings()))
    assert [cycle for _, cycle, _ in sink.series("run")] == [3, 6, 7]


def test_sample_statistics_are_those_of_all_samples(build_worker, dmd2, monkeypatch) -> None:
    other, worker = build_worker(dmd2()), build_worker(dmd2(), micro_batch_size=3)
    request = PhaseRequest(1, "student", "student", "student")
    draw = Draw(11, 1, "student")
    simulation = other.method.simulate(other.roles, other.batches.batch(draw, 8), draw)
    x0 = other.method.generate(other.roles, simulation).detach()
    assert len(x0) == 8
    result = worker.run_phase(request)
    assert result.metrics["sample_mean"] == pytest.approx(float(x0.mean()))
    assert result.metrics["sample_std"] == pytest.approx(float(x0.std(unbiased=False)))
    per_sample = x0.var(dim=1, unbiased=False).mean()
    assert result.metrics["sample_variance"] == pytest.approx(float(per_sample))


# Files.


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_hold_series_cycle_step_time_and_values(tmp_path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", 0)
    sink.write("student", 7, 3, {"loss": 0.5})
    # Readable while the run goes on.
    (entry,) = read(tmp_path / "metrics.jsonl")
    assert entry.pop("time") > 1e9
    assert entry == {"series": "student", "cycle": 3, "step": 7, "loss": 0.5}
    sink.close()


@pytest.mark.parametrize("start", [0, 2, 5])
def test_entries_after_the_resumed_cycle_are_dropped(tmp_path, start) -> None:
    file = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(file, 0)
    for cycle in range(1, 5):
        for step in (2 * cycle - 1, 2 * cycle):
            sink.write("fake_score", step, cycle, {"loss": 1.0})
    sink.close()
    with open(file, "a") as stream:
        stream.write('{"series": "fake_score", "cyc')  # cut short by a kill
    sink = JsonLinesSink(file, start)
    sink.write("fake_score", 99, start + 1, {"loss": 2.0})
    sink.close()
    kept = [c for c in (1, 1, 2, 2, 3, 3, 4, 4) if c <= start]
    assert [e["cycle"] for e in read(file)] == [*kept, start + 1]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"cycle": 3}', b"[]", b"3", b"null", b"", b"{", b"[" * 10**5, b"\xff\xfe",
        b'{"series": "run", "cycle": 1, "step": "a"}', b'{"series": "run", "cycle": 1}',
        b'{"series": "run", "cycle": "1", "step": 1}', b'{"series": 4, "cycle": 1, "step": 1}',
        b'{"series": "run", "cycle": 1, "step": true}',
        b'{"series": "run", "cycle": 1, "step": 1.5}',
        b'{"series": "run\xff", "cycle": 1, "step": 1}',
        b'{"series": "run", "cycle": 1, "step": 1, "time": "now"}',
        b'{"series": "run", "cycle": 1, "step": 1' + b"0" * 30 + b"}",
        b'{"series": "run", "cycle": 1, "step": 1, "loss": 1' + b"0" * 400 + b"}",
    ],
)  # fmt: skip
def test_lines_that_are_no_entries_are_dropped(tmp_path, line) -> None:
    good = b'{"series": "run", "cycle": 1, "step": 1, "loss": 0.5}'
    # The last line's end is missing too.
    (tmp_path / "metrics.jsonl").write_bytes(good + b"\n" + line + b"\n" + good)
    metrics = open_metrics(LoggingSettings(), tmp_path, 2)
    metrics.write("run", 2, 2, {"loss": 0.25})
    metrics.close()
    assert [e["loss"] for e in read(tmp_path / "metrics.jsonl")] == [0.5, 0.5, 0.25]


def test_a_full_disk_is_reported(mount) -> None:
    disk = mount("size=16k")
    sink = JsonLinesSink(disk / "metrics.jsonl", 0)
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written: .*No space"):  # noqa: PT012
        for cycle in range(1000):
            sink.write("student", cycle, cycle, {"text": "x" * 100})
    sink.close()


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def write_cycles(directory: Path, start: int, cycles: range, value: float, k: int = 3) -> None:
    metrics = open_metrics(LoggingSettings(), directory, start)
    for cycle in cycles:
        metrics.write("student", cycle, cycle, {"loss": value})
        for step in range(k * (cycle - 1) + 1, k * cycle + 1):
            metrics.write("fake_score", step, cycle, {"loss": value, "nothing": None})
    metrics.write("warning", cycles[-1], cycles[-1], {"message": "look"})
    metrics.close()


def test_tensorboard_has_the_same_series(tmp_path) -> None:
    write_cycles(tmp_path, 0, range(1, 4), 1.0)
    found = scalars(tmp_path / "tensorboard")
    assert found == {
        "student/loss": [(n, 1.0) for n in range(1, 4)],
        "fake_score/loss": [(n, 1.0) for n in range(1, 10)],
    }


def test_tensorboard_shows_a_resumed_run_without_gaps_or_doubles(tmp_path) -> None:
    write_cycles(tmp_path, 0, range(1, 6), 1.0)
    write_cycles(tmp_path, 3, range(4, 7), 2.0)
    found = scalars(tmp_path / "tensorboard")
    assert found["student/loss"] == [(n, 1.0 if n <= 3 else 2.0) for n in range(1, 7)]
    assert found["fake_score/loss"] == [(n, 1.0 if n <= 9 else 2.0) for n in range(1, 19)]


# Drift.

HEALTHY = {"sample_std": 1.0, "sample_variance": 0.8}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, []),
        ({"sample_std": 1.3, "sample_variance": 0.6}, []),
        ({"sample_std": 3.0}, ["saturation"]),
        ({"sample_variance": 0.05}, ["flat"]),
        ({"sample_std": 3.0, "sample_variance": 0.0}, ["saturation", "flat"]),
    ],
)
def test_drift_is_told_from_health(values, kinds) -> None:
    found = drift_warnings({**HEALTHY, **values}, HEALTHY)
    assert list(found) == kinds
    for message in found.values():
        assert "teacher" in message


def watch(values: list[tuple[float, float]], first_attempt: int = 1) -> list[tuple[int, str]]:
    """What a monitor says of student phases with these deviations and variances, by cycle."""
    sink = ListSink()
    monitor = DriftMonitor(Metrics([sink]), HEALTHY)
    request = PhaseRequest(1, "student", "student", "student")
    for cycle, (std, variance) in enumerate(values, start=first_attempt):
        metrics = {"sample_std": std, "sample_variance": variance}
        monitor.after_cycle(cycle, [PhaseResult(request, True, cycle, metrics)])
    return [(cycle, found["message"]) for _, cycle, found in sink.series("warning")]


def test_monitor_warns_of_a_deviation_that_goes_from_one_to_three(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="fewstep"):
        found = watch([(1.0, 0.8)] * 30 + [(1 + n / 20, 0.8) for n in range(40)] + [(3, 0.8)] * 40)
    ((cycle, message),) = found
    assert 30 < cycle < 80
    assert "saturation" in message
    assert "the teacher's 1:" in message
    assert [r.getMessage() for r in caplog.records] == [f"cycle {cycle}: {message}"]


def test_monitor_warns_of_flat_samples_with_the_figure() -> None:
    ((cycle, message),) = watch([(1.0, 0.8)] * 30 + [(1.0, 0.01)] * 60)
    assert 30 < cycle < 60
    assert "collapse to flat" in message
    assert "the teacher's 0.8:" in message


def test_monitor_warns_once_of_each_kind() -> None:
    found = watch([(1.0, 0.8)] * 30 + [(9.0, 0.0)] * 30 + [(1.0, 0.8)] * 60 + [(9.0, 0.0)] * 60)
    assert len(found) == 2


@pytest.mark.parametrize(
    "values",
    [
        [(1.0, 0.8), (1.2, 0.7), (0.8, 0.9)] * 30,
        # A student that is flat, or far too wide, only at its start.
        [(0.01, 0.0)] * 10 + [(1.0, 0.8)] * 80,
        # One strange batch.
        [(1.0, 0.8)] * 40 + [(4.0, 0.8)] + [(1.0, 0.8)] * 40,
        [(1.0, 0.8)] * 40 + [(float("nan"), float("inf"))] * 3 + [(1.0, 0.8)] * 40,
        [(float("nan"), float("nan"))] * 10 + [(1.0, 0.8)] * 40,
    ],
)
def test_monitor_is_silent_about_healthy_students(values) -> None:
    assert watch(values) == []


def test_monitor_warns_soon_after_a_resume() -> None:
    ((cycle, _),) = watch([(3.0, 0.8)] * 5, first_attempt=500)
    assert cycle < 505


def test_a_student_that_is_the_teacher_is_healthy(build_worker, dmd2) -> None:
    results = run_cycle(build_worker(dmd2(), scramble=False), 1, 1, CycleSettings())
    reference = {k: results[0].metrics[k] for k in ("sample_std", "sample_variance")}
    assert drift_warnings(results[0].metrics, reference) == {}
