"""A rank that raises, dies or hangs: the others stop and say why, and nothing is lost or left."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from fewstep.errors import TrainingError, UserError
from fewstep.parallel.failures import Reached, failure_store, telling_others
from fewstep.run import open_run

PLACE = r"cycle 3, phase fake_score/0 \(role fake_score\)"
# How long the end may take once the fault is noticed; the machine may be busy.
SECONDS = 30


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "timeout_seconds", "says", "others_say"),
    [
        ("raise", 100, rf"rank 1, {PLACE}: ValueError: this rank is broken", ""),
        ("kill", 100, rf"rank 0, {PLACE}: lost rank 1: ", "Error: rank 1 was killed by SIGKILL"),
        ("spin", 5, rf"rank 0, {PLACE}: rank 1: no answer within 5 s ", ""),
        pytest.param(
            *("wait", 5, rf"rank [01], {PLACE}: ranks did not meet within 5 s ", ""),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_broken_rank_ends_the_run(
    start, tmp_path: Path, kind: str, timeout_seconds: int, says: str, others_say: str
) -> None:
    started = start(f"launch.timeout_seconds={timeout_seconds}", fault=f"{kind}:1:3")
    code, out, err = started.end()
    (broken,) = [file for file in started.pids.iterdir() if file.read_text()]
    seconds = time.time() - float(broken.read_text())
    assert code == 1
    assert seconds < SECONDS + (timeout_seconds if timeout_seconds < 100 else 0)
    told = [line for line in err.splitlines() if line.startswith("Error: ")]
    expected = [f"Error: {says}"] + ([others_say] if others_say else [])
    assert len(told) == len(expected), err
    for line, pattern in zip(told, expected, strict=True):
        assert re.match(pattern, line), line
    assert err.count("Traceback") == (kind == "raise")
    assert "Complete" not in out
    # The last whole checkpoint is there, and nothing of a half one.
    assert [d.name for d in (tmp_path / "run" / "checkpoints").iterdir()] == ["cycle_000002"]
    assert not (tmp_path / "run" / ".lock").exists() or kind == "kill"
    assert open_run(tmp_path / "run").cycle == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mistake_that_every_rank_finds_is_said_once(start, tmp_path: Path) -> None:
    code, _, err = start(f"model.weights={tmp_path / 'nowhere'}").end()
    assert code == 2
    assert err.count("Error: ") == 1
    assert err.count("nowhere") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mistake_under_torchrun_is_said_once_before_the_ranks_have_met(start) -> None:
    _, _, err = start("train.cycles=-1", torchrun=True).end()
    assert err.count("train.cycles: ") == 1


LOST = "[/gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:705. This is typically"
LATE = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"
GLOO = {"lost": LOST, "late": LATE}
PHASE = "rank 0, cycle 3, phase student (role student)"


def in_phase(cause: Exception) -> TrainingError:
    """An error as a worker reports it."""
    error = TrainingError(f"{PHASE}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "message", "has_cause"),
    [
        (ValueError("x"), "rank 0, after cycle 2: ValueError: x", True),
        (TrainingError("x"), "rank 0, after cycle 2: x", False),
        (in_phase(ValueError("x")), f"{PHASE}: ValueError: x", True),
        (in_phase(TrainingError("x")), f"{PHASE}: TrainingError: x", False),
        (
            RuntimeError(LOST),
            "rank 0, after cycle 2: lost rank 1: Connection closed by peer [::1]:705",
            False,
        ),
        (
            in_phase(RuntimeError(LATE)),
            f"{PHASE}: rank 1: no answer within 4 s (launch.timeout_seconds): Timed out waiting "
            f"4000ms for recv operation",
            False,
        ),
    ],
)
def test_errors_say_where_they_were(error: Exception, message: str, has_cause: bool) -> None:
    reached = Reached()
    reached.after_cycle(2, [])
    with pytest.raises(TrainingError) as found, telling_others(2, 4, reached):
        raise error
    assert str(found.value) == message
    assert (found.value.__cause__ is not None) == has_cause


@pytest.fixture
def launcher(monkeypatch) -> Iterator[None]:
    """The store of a launcher, in which ranks tell one another what has ended a run."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    failure_store.cache_clear()
    yield
    failure_store.cache_clear()


def lose(rank: int, size: int, said: str, monkeypatch) -> str:
    """What a rank says that has lost the others, which it knows by what gloo says."""
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(TrainingError) as found, telling_others(size, 4, Reached()):
        raise RuntimeError(said)
    return str(found.value)


@pytest.mark.parametrize(
    ("size", "own", "others", "message"),
    [
        (2, "late", "late", "ranks did not meet within 4 s (launch.timeout_seconds): Timed out"),
        (2, "late", "lost", "ranks did not meet within 4 s (launch.timeout_seconds): Timed out"),
        (2, "lost", "late", "ranks did not meet within 4 s (launch.timeout_seconds): Timed out"),
        (2, "lost", "lost", "lost the connection to another rank: Connection closed by peer"),
        (3, "lost", "late", "rank 2: no answer within 4 s (launch.timeout_seconds): Timed out"),
        (3, "lost", "lost", "lost rank 2: Connection closed by peer"),
    ],
)
def test_a_rank_that_has_lost_another_says_so_if_that_one_has_only_waited_long_enough(
    launcher, monkeypatch, size: int, own: str, others: str, message: str
) -> None:
    """The first to give up closes its connections, so that the others lose it before their time."""
    other = multiprocessing.get_context("fork").Process(
        target=lose, args=(1, size, GLOO[others], monkeypatch)
    )
    other.start()
    assert lose(0, size, GLOO[own], monkeypatch).startswith(f"rank 0: {message}")
    other.join()
    assert other.exitcode == 0


def test_mistakes_and_errors_of_a_process_alone_are_raised_as_they_are() -> None:
    for error, size in ((UserError("x"), 2), (ValueError("x"), 1)):
        with pytest.raises(type(error), match=r"^x$"), telling_others(size, 4, Reached()):
            raise error
