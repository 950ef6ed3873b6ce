"""Metrics: one series for each role, each with its own counter, to files and trackers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, final

from pydantic import Field

from fewstep.errors import UserError
from fewstep.roles.role import FAKE_SCORE, STUDENT
from fewstep.settings import Settings
from fewstep.training.phase import PhaseResult

logger = logging.getLogger("fewstep")


@final
class LoggingSettings(Settings):
    """What is written down during a run."""

    every: Annotated[int, Field(gt=0)] = Field(10, description="cycles between log entries")
    teacher_samples: Annotated[int, Field(ge=0)] = Field(
        64,
        description="samples of the teacher, made whenever the run starts, that the spread of the "
        "student's is held against; 0: none, and no warning of drift",
    )
    tensorboard: bool = Field(True, description="write <run_dir>/tensorboard")
    wandb_project: str | None = Field(
        None, description="Weights & Biases project (needs the extra fewstep[wandb])"
    )


class MetricsSink(Protocol):
    """Somewhere that metrics go."""

    def write(self, series: str, step: int, cycle: int, values: Mapping[str, Any]) -> None:
        """One entry of a series."""
        ...

    def close(self) -> None:
        """Flush what is buffered."""
        ...


@final
class JsonLinesSink:
    """`metrics.jsonl`: one object a line.

    Entries after the resumed cycle are dropped, and lines that are no entries.
    """

    def __init__(self, file: Path, start_cycle: int) -> None:
        """Open for appending, keeping the entries of cycles up to `start_cycle`."""
        lines = file.read_bytes().splitlines() if file.exists() else []
        read = [(line, _read_entry(line)) for line in lines]
        kept = [(line, e) for line, e in read if e is not None and e["cycle"] <= start_cycle]
        temporary = file.with_suffix(".tmp")
        temporary.write_bytes(b"".join(line + b"\n" for line, _ in kept))
        os.replace(temporary, file)
        self._file = file
        self.kept = [entry for _, entry in kept]
        self._stream = open(file, "a", buffering=1)  # noqa: SIM115 (closed by close)

    def write(self, series: str, step: int, cycle: int, values: Mapping[str, Any]) -> None:
        """See `MetricsSink.write`."""
        # Strict JSON has no NaN or infinity: what a skipped phase gives is null.
        plain = {k: v if _is_finite(v) else None for k, v in values.items()}
        entry = {"series": series, "cycle": cycle, "step": step, "time": time.time(), **plain}
        try:
            self._stream.write(json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"{self._file} could not be written: {error}") from error

    def close(self) -> None:
        """See `MetricsSink.close`."""
        # What a full disk has left in the buffer was reported by `write`.
        with contextlib.suppress(OSError):
            self._stream.close()


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _read_entry(line: bytes) -> dict[str, Any] | None:
    """The entry that a line holds, or None where it is damaged or something else."""
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("series"), str):
        return None
    numbers = [value for value in entry.values() if isinstance(value, int)]
    whole = all(type(entry.get(key)) is int for key in ("cycle", "step"))
    # Event files hold 64 bits.
    usable = whole and all(abs(value) < 2**63 for value in numbers)
    return entry if usable and isinstance(entry.get("time", 0.0), int | float) else None


@final
class TensorBoardSink:
    """Scalars named `<series>/<metric>` for TensorBoard."""

    def __init__(self, directory: Path, kept: Sequence[Mapping[str, Any]]) -> None:
        """Write events into `directory`, starting with the entries of a resumed run.

        Every series counts its own steps, which TensorBoard's `purge_step` cannot tell apart: it
        would hide most of the fake score's. So a resumed run's events are written anew.
        """
        # Imported here: it takes a second, and not every command logs.
        from torch.utils.tensorboard import SummaryWriter

        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(directory)
        for entry in kept:
            values = dict(entry)
            series, step, _ = values.pop("series"), values.pop("step"), values.pop("cycle")
            self._add(series, step, values, values.pop("time", None))

    def write(self, series: str, step: int, cycle: int, values: Mapping[str, Any]) -> None:
        """See `MetricsSink.write`."""
        self._add(series, step, values, time.time())

    def _add(self, series: str, step: int, values: Mapping[str, Any], when: float | None) -> None:
        for key, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{series}/{key}", value, step, walltime=when)
            elif value is not None:
                self._writer.add_text(f"{series}/{key}", str(value), step, walltime=when)

    def close(self) -> None:
        """See `MetricsSink.close`."""
        self._writer.close()


@final
class WandbSink:
    """Weights & Biases; each series has its own step axis."""

    def __init__(self, project: str, directory: Path) -> None:
        """Start (or go on with) the tracker's run for this directory."""
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "logging.wandb_project needs Weights & Biases: pip install 'fewstep[wandb]'"
            ) from error
        self._run = wandb.init(project=project, dir=str(directory), name=directory.name)

    def write(self, series: str, step: int, cycle: int, values: Mapping[str, Any]) -> None:
        """See `MetricsSink.write`."""
        entry = {f"{series}/{key}": value for key, value in values.items()}
        self._run.log({**entry, f"{series}/step": step, "cycle": cycle})

    def close(self) -> None:
        """See `MetricsSink.close`."""
        self._run.finish()


@final
class Metrics:
    """All sinks of a run as one."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        """`sinks`: where every entry goes."""
        self._sinks = list(sinks)

    def write(self, series: str, step: int, cycle: int, values: Mapping[str, Any]) -> None:
        """One entry of a series, to every sink."""
        for sink in self._sinks:
            sink.write(series, step, cycle, values)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def open_metrics(settings: LoggingSettings, directory: Path, start_cycle: int) -> Metrics:
    """The sinks that a recipe asks for; JSON lines always."""
    lines = JsonLinesSink(directory / "metrics.jsonl", start_cycle)
    sinks: list[MetricsSink] = [lines]
    if settings.tensorboard:
        sinks.append(TensorBoardSink(directory / "tensorboard", lines.kept))
    if settings.wandb_project is not None:
        sinks.append(WandbSink(settings.wandb_project, directory))
    return Metrics(sinks)


@final
class LoggingHook:
    """Writes every phase's metrics, and how the run as a whole goes, every few cycles."""

    def __init__(self, metrics: Metrics, settings: LoggingSettings, last_cycle: int) -> None:
        """`last_cycle` is logged whatever the interval."""
        self._metrics = metrics
        self._settings = settings
        self._last_cycle = last_cycle
        self._since = time.perf_counter()
        self._cycles = 0

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        self._cycles += 1
        if cycle != self._last_cycle and cycle % self._settings.every != 0:
            return
        for result in results:
            self._metrics.write(result.request.role, result.attempt, cycle, result.metrics)
        self._metrics.write("run", cycle, cycle, self._run_values(results))
        self._since, self._cycles = time.perf_counter(), 0

    def _run_values(self, results: Sequence[PhaseResult]) -> dict[str, float]:
        seconds = (time.perf_counter() - self._since) / self._cycles
        values = {"seconds_per_cycle": seconds}
        updates = {r.request.role: r.metrics["updates"] for r in results}
        fake = [r for r in results if r.request.role == FAKE_SCORE]
        if fake:
            # Before its first update of the cycle, on samples it has not seen: how far it lags.
            # Without the loss of a classifier that is trained with it.
            first = fake[0].metrics
            values["fake_score_loss_on_fresh_samples"] = first.get("denoising_loss", first["loss"])
        if updates.get(FAKE_SCORE):
            done = updates.get(STUDENT, 0)
            values["student_updates_per_fake_update"] = done / updates[FAKE_SCORE]
        return values


@final
class DriftMonitor:
    """Warns, once for each kind, when the student's clean samples leave the teacher's statistics.

    Judges a running mean over student phases, and only after the first `GRACE` of them: a
    student starts out with flat samples.
    """

    GRACE = 20
    MEMORY = 0.9

    def __init__(self, metrics: Metrics, reference: Mapping[str, float]) -> None:
        """`reference`: sample_std and sample_variance of teacher samples."""
        self._metrics = metrics
        self._reference = reference
        self._warned: set[str] = set()
        self._means: dict[str, float] = {}

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        for result in results:
            if result.request.role == STUDENT and "sample_std" in result.metrics:
                self._follow(result.metrics)
                if result.attempt > self.GRACE:
                    self._judge(cycle)

    def _follow(self, values: Mapping[str, float]) -> None:
        for key in ("sample_std", "sample_variance"):
            if math.isfinite(values[key]):
                old = self._means.get(key, values[key])
                self._means[key] = self.MEMORY * old + (1 - self.MEMORY) * values[key]

    def _judge(self, cycle: int) -> None:
        for kind, message in drift_warnings(self._means, self._reference).items():
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning("cycle %d: %s", cycle, message)
                self._metrics.write("warning", cycle, cycle, {"message": message})


def drift_warnings(values: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, str]:
    """What is wrong with samples of these statistics, by kind.

    Args:
        values: "sample_std" (over all entries) and "sample_variance" (mean of each sample's own).
        reference: the same of the teacher's samples.
    """
    found = {}
    std, expected = values.get("sample_std", 0.0), reference["sample_std"]
    if std > 1.5 * expected:
        found["saturation"] = (
            f"the student's samples have standard deviation {std:.3g}, the teacher's "
            f"{expected:.3g}: they drift towards saturation; lower the student's learning rate or "
            f"the guidance, or raise method.fake_updates_per_student"
        )
    variance, usual = values.get("sample_variance", math.inf), reference["sample_variance"]
    if variance < 0.25 * usual:
        found["flat"] = (
            f"the variance within each student sample is {variance:.3g}, the teacher's "
            f"{usual:.3g}: the samples collapse to flat output"
        )
    return found
