"""Shares of ranks, and what a process alone does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewstep.errors import UserError
from fewstep.parallel.ranks import CPU, SINGLE, Ranks, local_device, share, split_evenly


@given(count=st.integers(0, 300), size=st.integers(1, 40))
def test_shares_are_all_things_once_and_even(count: int, size: int) -> None:
    shares = [share(count, size, rank) for rank in range(size)]
    assert [i for part in shares for i in part] == list(range(count))
    lengths = [len(part) for part in shares]
    assert max(lengths) - min(lengths) <= 1


@given(start=st.integers(0, 50), count=st.integers(0, 100), parts=st.integers(1, 20))
def test_rows_are_split_evenly(start: int, count: int, parts: int) -> None:
    rows = range(start, start + count)
    found = split_evenly(rows, parts)
    assert len(found) == parts
    assert [i for part in found for i in part] == list(rows)


def test_a_process_alone_talks_to_nobody() -> None:
    numbers = torch.tensor([1.5, float("nan")], dtype=torch.float64)
    assert SINGLE.first
    assert SINGLE.share(7) == range(7)
    assert SINGLE.sum(numbers) is numbers
    assert torch.equal(SINGLE.gather(torch.arange(3)), torch.arange(3)[None])
    assert torch.equal(SINGLE.gather_shares(torch.arange(3), 3), torch.arange(3))
    assert SINGLE.tell(lambda: {"a": 1}) == {"a": 1}
    assert SINGLE.any(True)
    assert not SINGLE.any(False)
    SINGLE.barrier()


def test_one_device_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match=r"'cuda:0' names one device, but there are 2 processes"):
        local_device(torch.device("cuda:0"))
    assert local_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert local_device(CPU) == CPU


def test_shares_of_ranks_are_those_of_the_function() -> None:
    assert [Ranks(r, 3, CPU, True).share(8) for r in range(3)] == [
        range(2),
        range(2, 5),
        range(5, 8),
    ]
