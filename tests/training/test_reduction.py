"""How a batch is cut for ranks and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewstep.parallel.ranks import CPU, Ranks
from fewstep.training.reduction import micro_batches


@given(
    batch=st.integers(1, 60),
    size=st.integers(1, 12),
    micro=st.one_of(st.none(), st.integers(1, 20)),
)
def test_every_sample_counts_once_and_all_ranks_call_as_often(
    batch: int, size: int, micro: int | None
) -> None:
    size = min(size, batch)
    per_rank = [micro_batches(batch, Ranks(r, size, CPU, True), micro) for r in range(size)]
    assert len({len(parts) for parts in per_rank}) == 1
    counted = [i for parts in per_rank for p in parts if p.count for i in p.rows]
    assert counted == list(range(batch))
    for parts in per_rank:
        for part in parts:
            assert len(part.rows) >= 1
            assert part.count in (0, len(part.rows))
            assert micro is None or len(part.rows) <= micro
        # No more calls than the fullest rank needs.
        assert len(parts) == -(-max(len(p) for p in spread(batch, size)) // (micro or batch))


def spread(batch: int, size: int) -> list[range]:
    return [Ranks(r, size, CPU, True).share(batch) for r in range(size)]


@pytest.mark.parametrize(
    ("batch", "size", "micro", "rank", "rows"),
    [
        (8, 1, 3, 0, [range(3), range(3, 6), range(6, 8)]),
        (6, 2, 2, 1, [range(3, 5), range(5, 6)]),
        # 2 + 3 samples: the first rank could do with one call, the second cannot.
        (5, 2, 2, 0, [range(1), range(1, 2)]),
    ],
)
def test_some_written_out(batch, size, micro, rank, rows) -> None:
    parts = micro_batches(batch, Ranks(rank, size, CPU, True), micro)
    assert [p.rows for p in parts] == rows


def test_a_rank_with_too_few_repeats_its_last_sample_and_does_not_count_it() -> None:
    # Six samples on four ranks: 1 + 2 + 1 + 2.
    parts = micro_batches(6, Ranks(2, 4, CPU, True), 1)
    assert [(p.rows, p.count) for p in parts] == [(range(3, 4), 1), (range(3, 4), 0)]
