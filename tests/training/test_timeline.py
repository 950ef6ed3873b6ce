"""The timeline: where a cycle's time went, against hand-made cycles, and its trace file."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from fewstep.errors import UserError
from fewstep.training.timeline import (
    FIRST_CYCLES,
    Span,
    Timeline,
    cycle_timing,
    order_lanes,
    read_trace,
    timed,
    union_seconds,
)

EPOCH = 1_764_453_600.0


def span(lane: str, kind: str, start: float, seconds: float, **changes) -> Span:
    values = {"name": kind, "lane": lane, "kind": kind, "cycle": 7, "start": EPOCH + start}
    return Span(**{**values, "seconds": seconds, **changes})


def one_cycle() -> list[Span]:
    """A cycle of 20 s that starts and ends with a second of the driver's own.

    second   0  1     4        8     10 11    13 14       18 19 20
    rollout      ====                              (0: 1..4, 1: 1..3)   push 18..19
    critic             ====train  ==score =hand_off             (rank 1: train 4..6)
    actor                                  =hand_off ==train =push
    driver   d                           saves 15..17           d
    """
    return [
        span("driver", "wait", 0, 20),
        span("rollout/0", "rollout", 1, 3),
        span("rollout/1", "rollout", 1, 2),
        span("critic/0", "train", 4, 4),
        span("critic/1", "train", 4, 2),
        span("critic/0", "score", 8, 2),
        span("critic/1", "score", 8, 2),
        span("critic/0", "hand_off", 10, 1, bytes=1000),
        # The other side of the transfer, which counts no bytes.
        span("actor/0", "hand_off", 10.5, 1.5),
        span("actor/0", "train", 12, 2),
        span("driver", "save", 15, 2),
        span("actor/0", "push", 17, 1, bytes=64),
        span("rollout/0", "push", 17.5, 1.5),
        span("rollout/1", "offload", 18, 0.5, name="sleep", bytes=32),
    ]


def test_time_of_a_cycle_goes_where_it_went() -> None:
    values = cycle_timing(one_cycle())
    assert values == pytest.approx(
        {
            "seconds": 20.0,
            "rollout_seconds": 3.0,  # 1..4 and 1..3
            "score_seconds": 2.0,
            "hand_off_seconds": 2.0,  # 10..11 and 10.5..12
            "hand_off_bytes": 1000.0,
            "push_seconds": 2.0,  # 17..18 and 17.5..19
            "push_bytes": 64.0,
            "offload_seconds": 0.5,
            "offload_bytes": 32.0,
            "save_seconds": 2.0,
            "validation_seconds": 0.0,
            "train_critic_seconds": 3.0,  # (4 + 2) / 2
            "wait_critic_seconds": 20 - (7 + 4) / 2,  # busy 4..11; 4..6 and 8..10
            "train_actor_seconds": 2.0,
            "wait_actor_seconds": 20 - 4.5,  # busy 10.5..14 and 17..18
            "wait_rollout_seconds": 20 - (4.5 + 2.5) / 2,
            "driver_seconds": 3.0,  # 0..1, 14..15 and 19..20; its save of 15..17 is not
        },
        abs=1e-6,
    )


def test_seconds_do_not_depend_on_the_order_of_the_spans() -> None:
    spans = one_cycle()
    random.Random(0).shuffle(spans)
    assert cycle_timing(spans) == pytest.approx(cycle_timing(one_cycle()), abs=1e-6)


def test_spans_within_spans_count_once() -> None:
    spans = [
        span("actor/0", "train", 0, 10),
        span("actor/0", "train", 2, 3),
        span("actor/0", "offload", 9, 3),
        span("actor/0", "offload", 20, 0),
    ]
    values = cycle_timing(spans)
    assert values["train_actor_seconds"] == pytest.approx(10)
    assert values["wait_actor_seconds"] == pytest.approx(8)  # of 20: busy 0..12
    assert values["driver_seconds"] == pytest.approx(8)


def test_waiting_is_not_being_busy() -> None:
    spans = [span("actor/0", "wait", 0, 6), span("actor/0", "train", 6, 2)]
    values = cycle_timing(spans)
    assert values["wait_actor_seconds"] == pytest.approx(6)
    assert values["driver_seconds"] == pytest.approx(6)


def test_union_against_counting_seconds_one_by_one() -> None:
    draw = random.Random(3)
    for _ in range(50):
        pairs = [(draw.randrange(30), draw.randrange(30)) for _ in range(draw.randrange(8))]
        covered = {second for start, end in pairs for second in range(start, end)}
        assert union_seconds(pairs) == len(covered)


def test_cycle_without_spans_has_no_values() -> None:
    assert Timeline(None).cycle_values(3) == {}


def test_lanes_are_in_the_order_of_the_work() -> None:
    spans = [
        span("driver", "wait", 0, 1),
        span("rollout/0", "rollout", 0, 1),
        span("actor/0", "train", 3, 1),
        *(span(f"critic/{rank}", "train", 1, 1) for rank in (10, 2, 0)),
    ]
    expected = ["critic/0", "critic/2", "critic/10", "actor/0", "rollout/0", "driver"]
    assert order_lanes(spans) == expected


def test_measured_spans_follow_one_another_and_survive_an_exception() -> None:
    spans: list[Span] = []
    with timed(spans.append, "outer", "driver", "save", 2):
        with timed(spans.append, "inner", "driver", "push", 2, bytes=5):
            pass
        with pytest.raises(KeyError), timed(spans.append, "failed", "driver", "wait", 2):
            raise KeyError
    inner, failed, outer = spans
    assert [s.name for s in spans] == ["inner", "failed", "outer"]
    assert (inner.kind, inner.cycle, inner.lane, inner.bytes) == ("push", 2, "driver", 5)
    assert 0 <= inner.seconds + failed.seconds <= outer.seconds
    assert outer.start <= inner.start <= failed.start


def test_measure_adds_to_its_own_cycle() -> None:
    timeline = Timeline(None)
    with timeline.measure("save", "driver", "save", 4):
        pass
    assert timeline.cycle_values(4)["save_seconds"] == timeline.cycle_values(4)["seconds"] > 0
    assert timeline.cycle_values(5) == {}
    timeline.write()


def test_trace_keeps_the_first_and_the_last_cycles(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    timeline = Timeline(file, keep_cycles=3)
    for cycle in range(11, 31):
        timeline.extend([span("critic/0", "train", cycle, 1, cycle=cycle)] * 2)
    timeline.add(span("critic/0", "train", 15, 1, cycle=15))  # too late
    timeline.write()
    kept = [s.cycle for s in read_trace(file)]
    assert FIRST_CYCLES == 2
    assert kept == [11, 11, 12, 12, 28, 28, 29, 29, 30, 30]
    assert timeline.cycle_values(30)["seconds"] == pytest.approx(1, abs=1e-6)
    assert timeline.cycle_values(20) == {}


def test_trace_gives_the_spans_back(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    file.write_text("of an earlier start")
    timeline = Timeline(file)
    timeline.extend([*one_cycle(), span("actor/0", "train", 1 / 3, 1e-7, name="é/0")])
    timeline.write()
    read = read_trace(file)
    expected = [*one_cycle(), span("actor/0", "train", 1 / 3, 1e-7, name="é/0")]
    for got, want in zip(read, expected, strict=True):
        assert (got.name, got.lane, got.kind, got.cycle, got.bytes) == (
            want.name,
            want.lane,
            want.kind,
            want.cycle,
            want.bytes,
        )
        assert got.start == pytest.approx(want.start, abs=1e-6)
        assert got.seconds == pytest.approx(want.seconds, abs=2e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_trace_is_what_a_viewer_reads(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.extend(one_cycle())
    timeline.write()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in events
        if event["ph"] == "M"
    }
    # Processes are groups in the order of the work.
    assert [names["process_name", process, 0] for process in (1, 2, 3, 4)] == [
        "critic",
        "actor",
        "rollout",
        "driver",
    ]
    assert names["thread_name", 1, 1] == "rank 1"
    assert len(complete) == len(one_cycle())
    scores = [event for event in complete if event["cat"] == "score"]
    assert [(event["pid"], event["tid"]) for event in scores] == [(1, 0), (1, 1)]
    assert {event["dur"] for event in scores} == {2_000_000}
    assert {event["ts"] for event in scores} == {int((EPOCH + 8) * 1e6)}


def test_spans_that_touch_still_touch_in_the_trace(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    # Viewers drop events that overlap their predecessor, if only by a microsecond.
    start = EPOCH
    for seconds in (0.0001, 0.0012346, 0.3333337, 1 / 3, 2 / 7) * 10:
        timeline.add(Span("n", "a/0", "train", 1, start, seconds))
        start += seconds
    timeline.write()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    for earlier, later in pairwise(complete):
        assert earlier["ts"] + earlier["dur"] == later["ts"]


def event(**changes) -> str:
    args = {"lane": "a/0", "cycle": 1, "bytes": 0}
    values = {"ph": "X", "name": "n", "cat": "train", "ts": 1, "dur": 1, "args": args}
    return json.dumps({"traceEvents": [{**values, **changes}]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ('{"traceEvents": [{"ph"', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "traceEvents"),
        ('{"traceEvents": 3}', "traceEvents"),
        ('{"traceEvents": [3]}', "event 0 is int"),
        (event(name=3), "name is 3"),
        (event(args=None), "lane is None"),
        (event(ts=float("nan")), "ts is nan"),
        (event(dur=-1), "dur is -1"),
        (event(dur=True), "dur is True"),
        (event(ts=10**400), "ts is 1000"),
        (event(cat="idle"), "cat is 'idle'.*rollout"),
        (event(args={"lane": "a/0", "cycle": "1", "bytes": 0}), "cycle is '1'"),
    ],
)
def test_damaged_trace_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "timeline.json"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"(?s){file}.*{said}"):
        read_trace(file)


def test_trace_that_is_missing_or_no_text_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be read"):
        read_trace(tmp_path / "timeline.json")
    (tmp_path / "timeline.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="no JSON"):
        read_trace(tmp_path / "timeline.json")


def test_failure_to_write_keeps_what_was_there(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "timeline.json"
    timeline = Timeline(file)
    timeline.add(span("a/0", "train", 0, 1))
    timeline.write()
    before = file.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    timeline.add(span("a/0", "train", 1, 1))
    with pytest.raises(UserError, match="no space is left"):
        timeline.write()
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def test_at_least_one_cycle_is_kept() -> None:
    with pytest.raises(ValueError, match="keep_cycles"):
        Timeline(None, keep_cycles=0)
