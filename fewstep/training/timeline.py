"""What every process of a run was doing when, and where the time of a cycle went."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, final, get_args

from fewstep.errors import UserError
from fewstep.files import saving

Kind = Literal[
    "rollout", "train", "score", "hand_off", "push", "offload", "save", "validation", "wait"
]
"""What a process was doing; "wait" is doing nothing."""

KINDS: tuple[Kind, ...] = get_args(Kind)
DRIVER, ROLLOUT = "driver", "rollout"
FIRST_CYCLES = 2
"""Cycles kept from the start of a run: they show what the first calls cost."""

Interval = tuple[float, float]
"""Start and end, in seconds."""


@final
@dataclass(frozen=True)
class Span:
    """One thing that one process did.

    Attributes:
        name: what it was, e.g. "fake_score/0", "student", "sleep".
        lane: who did it: "<group>/<rank>" ("critic/0", "rollout/3"), or "driver".
        kind: what it counts as.
        cycle: 1, 2, ...
        start: when it began, in seconds since the epoch by the clock of that process's machine.
        seconds: how long it took.
        bytes: moved by it. Only one side of a transfer may count them.
    """

    name: str
    lane: str
    kind: Kind
    cycle: int
    start: float
    seconds: float
    bytes: int = 0


def group_of(lane: str) -> str:
    """The group of a lane: "critic" of "critic/1", "driver" of "driver"."""
    return lane.partition("/")[0]


def rank_of(lane: str) -> int:
    """The rank of a lane: 1 of "critic/1"; 0 where it has none."""
    rank = lane.partition("/")[2]
    return int(rank) if rank.isdecimal() else 0


def order_lanes(spans: Iterable[Span]) -> list[str]:
    """Lanes by group and rank: groups by their first span, then rollout workers, then driver."""
    first: dict[str, float] = {}
    lanes: set[str] = set()
    for span in spans:
        group = group_of(span.lane)
        first[group] = min(span.start, first.get(group, math.inf))
        lanes.add(span.lane)
    last = (ROLLOUT, DRIVER)

    def position(lane: str) -> tuple[int, float, str, int, str]:
        group = group_of(lane)
        late = last.index(group) + 1 if group in last else 0
        return late, first[group], group, rank_of(lane), lane

    return sorted(lanes, key=position)


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals: what overlaps counts once, what ends early not at all."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def cycle_timing(spans: Sequence[Span]) -> dict[str, float]:
    """Where the time of one cycle went.

    Seconds of a kind are those in which at least one process was at it (the union over lanes), so
    kinds that run side by side, or within one another, may sum to more than the cycle.

    Args:
        spans: of one cycle, of all its processes.

    Returns:
        `seconds` from the first span's start to the last one's end; `<kind>_seconds` for rollout,
        score, hand_off, push, offload, save and validation, and `<kind>_bytes` for hand_off, push
        and offload, zero where there was none; `train_<group>_seconds`, the mean over a trainer
        group's ranks; `wait_<group>_seconds`, what is left of the cycle when a rank does nothing,
        mean over the ranks, for trainer groups and rollout workers; `driver_seconds`, in which no
        other process was busy and the driver neither saved nor validated. Empty without spans.
    """
    if not spans:
        return {}
    origin = min(span.start for span in spans)
    seconds = max(span.start - origin + span.seconds for span in spans)

    def total(chosen: Iterable[Span]) -> float:
        starts = ((span.start - origin, span.seconds) for span in chosen)
        return union_seconds((start, start + length) for start, length in starts)

    values = {"seconds": seconds}
    for kind in KINDS:
        if kind not in ("train", "wait"):
            values[f"{kind}_seconds"] = total(span for span in spans if span.kind == kind)
        if kind in ("hand_off", "push", "offload"):
            values[f"{kind}_bytes"] = float(sum(s.bytes for s in spans if s.kind == kind))
    by_group: dict[str, dict[str, list[Span]]] = {}
    for span in spans:
        by_group.setdefault(group_of(span.lane), {}).setdefault(span.lane, []).append(span)
    by_group.pop(DRIVER, None)
    for group, lanes in by_group.items():
        trained = [total(s for s in own if s.kind == "train") for own in lanes.values()]
        busy = [total(s for s in own if s.kind != "wait") for own in lanes.values()]
        if group != ROLLOUT:
            values[f"train_{group}_seconds"] = sum(trained) / len(lanes)
        values[f"wait_{group}_seconds"] = max(0.0, seconds - sum(busy) / len(lanes))
    others = total(span for span in spans if _is_not_drivers_own(span))
    values["driver_seconds"] = max(0.0, seconds - others)
    return values


def _is_not_drivers_own(span: Span) -> bool:
    if group_of(span.lane) == DRIVER:
        return span.kind in ("save", "validation")
    return span.kind != "wait"


@contextmanager
def timed(
    add: Callable[[Span], None], name: str, lane: str, kind: Kind, cycle: int, bytes: int = 0
) -> Iterator[None]:
    """Hand what the body of a `with` took to `add`, as a span; also when the body raises."""
    # The length comes from a clock that is never set back.
    start, since = time.time(), time.perf_counter()
    try:
        yield
    finally:
        add(Span(name, lane, kind, cycle, start, time.perf_counter() - since, bytes))


@final
class Timeline:
    """The spans of a run's first and last cycles, for a trace viewer and for the report."""

    def __init__(self, file: Path | None, keep_cycles: int = 20) -> None:
        """Start empty; a file of an earlier start of the run is replaced by the first `write`.

        Args:
            file: where `write` puts the trace; None writes nothing.
            keep_cycles: latest cycles kept, beside the first `FIRST_CYCLES`. So the file, and
                what is held in memory, stays bounded.

        Raises:
            ValueError: where `keep_cycles` is not positive.
        """
        if keep_cycles < 1:
            raise ValueError(f"keep_cycles must be positive, got {keep_cycles}")
        self._file = file
        self._keep = keep_cycles
        self._spans: dict[int, list[Span]] = {}

    def add(self, span: Span) -> None:
        """Add one span. One that comes in for a cycle no longer kept is dropped."""
        self._spans.setdefault(span.cycle, []).append(span)
        if len(self._spans) > FIRST_CYCLES + self._keep:
            del self._spans[sorted(self._spans)[FIRST_CYCLES]]

    def extend(self, spans: Iterable[Span]) -> None:
        """Add spans that other processes have sent."""
        for span in spans:
            self.add(span)

    @contextmanager
    def measure(
        self, name: str, lane: str, kind: Kind, cycle: int, bytes: int = 0
    ) -> Iterator[None]:
        """Add what the body of a `with` took as a span."""
        with timed(self.add, name, lane, kind, cycle, bytes):
            yield

    def cycle_values(self, cycle: int) -> dict[str, float]:
        """Metrics of a kept cycle, for the series "timing": see `cycle_timing`."""
        return cycle_timing(self._spans.get(cycle, ()))

    def write(self) -> None:
        """Replace the file by a trace of the cycles kept, at once.

        Raises:
            UserError: where it cannot be written.
        """
        if self._file is None:
            return
        spans = [span for cycle in sorted(self._spans) for span in self._spans[cycle]]
        temporary = self._file.with_name(f".{self._file.name}.tmp")
        with saving(self._file, lambda: temporary.unlink(missing_ok=True)):
            temporary.write_text(json.dumps(trace_document(spans), separators=(",", ":")))
            os.replace(temporary, self._file)


def trace_document(spans: Sequence[Span]) -> dict[str, Any]:
    """Spans in the Trace Event Format of chrome://tracing and Perfetto.

    A group is a process and a rank its thread; times are in whole microseconds.
    """
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    for lane in order_lanes(spans):
        group = group_of(lane)
        if group not in processes:
            process = processes[group] = len(processes) + 1
            events.append(_metadata("process_name", process, 0, group))
            events.append(_metadata("process_sort_index", process, 0, process))
        thread = f"rank {rank_of(lane)}" if "/" in lane else lane
        events.append(_metadata("thread_name", processes[group], rank_of(lane), thread))
    for span in spans:
        # Both ends are rounded: spans that touch, or nest, still do.
        start, end = round(span.start * 1e6), round((span.start + span.seconds) * 1e6)
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "ts": start,
                "dur": max(0, end - start),
                "pid": processes[group_of(span.lane)],
                "tid": rank_of(span.lane),
                "args": {"lane": span.lane, "cycle": span.cycle, "bytes": span.bytes},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(what: str, process: int, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {key: value}}


def read_trace(file: Path) -> list[Span]:
    """The spans of a file that `Timeline.write` has written, to the microsecond.

    Raises:
        UserError: where the file cannot be read, is damaged, or is a trace of something else.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} could not be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON, or cut off: {error}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise UserError(f"{file} is no trace: it has no list 'traceEvents'")
    spans = []
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise UserError(f"{file}: event {index} is {type(event).__name__}, not an object")
        if event.get("ph") == "X":
            spans.append(_read_span(event, f"{file}: event {index}"))
    return spans


def _read_span(event: dict[str, Any], where: str) -> Span:
    args = event.get("args")
    values = {**(args if isinstance(args, dict) else {}), **event}
    for key in ("name", "lane"):
        if not isinstance(values.get(key), str):
            raise UserError(f"{where}: {key} is {values.get(key)!r}; a text is expected")
    for key in ("ts", "dur", "cycle", "bytes"):
        value = values.get(key)
        # Beyond 2**53 a float no longer holds every whole number.
        if type(value) is not int or not 0 <= value < 2**53:
            raise UserError(f"{where}: {key} is {value!r}; a whole number is expected, 0 or more")
    if values.get("cat") not in KINDS:
        raise UserError(f"{where}: cat is {values.get('cat')!r}; one of {list(KINDS)} is expected")
    return Span(
        values["name"],
        values["lane"],
        cast(Kind, values["cat"]),
        values["cycle"],
        values["ts"] / 1e6,
        values["dur"] / 1e6,
        values["bytes"],
    )
