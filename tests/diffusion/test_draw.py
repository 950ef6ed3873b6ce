import math
import pickle

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewstep.diffusion.draw import Draw, permutation, philox

DRAW = Draw(7, 3, "student")
IDS = torch.arange(20_000)

# Random123's kat_vectors, philox4x32 with ten rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The paper's rounds in Python's own integers."""
    (c0, c1, c2, c3), (k0, k1), mask = counter, key, 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, answer: str) -> None:
    low, high = numbers(key)
    # Beside another counter, so that a column does not see its neighbours.
    columns = torch.tensor([numbers(counter), [1, 2, 3, 4]]).T
    assert philox(columns, low | high << 32)[:, 0].tolist() == numbers(answer)


word = st.integers(0, 2**32 - 1)


@given(counter=st.lists(word, min_size=4, max_size=4), key=st.lists(word, min_size=2, max_size=2))
@settings(max_examples=60, deadline=None)
def test_philox_equals_the_papers_rounds(counter: list[int], key: list[int]) -> None:
    ours = philox(torch.tensor(counter)[:, None], key[0] | key[1] << 32)
    assert ours.flatten().tolist() == philox_by_hand(counter, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_samples_numbers_do_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    ids = torch.arange(12)
    order = torch.tensor([5, 0, 11, 3, 2, 1, 4, 6, 10, 9, 8, 7])

    def draws(chosen: Tensor) -> list[Tensor]:
        return [
            DRAW.normal("eps", chosen, (3, 5), dtype),
            DRAW.uniform("sigma", chosen, dtype),
            DRAW.integers("labels", chosen, 10),
        ]

    for whole, reordered in zip(draws(ids), draws(ids[order]), strict=True):
        assert torch.equal(whole[order], reordered)
    for sizes in ([12], [1] * 12, [5, 7], [4, 4, 3, 1]):
        parts = [draws(part) for part in ids.split(sizes)]
        for whole, split in zip(draws(ids), zip(*parts, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(split))


@given(count=st.integers(1, 40), more=st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_the_first_numbers_do_not_depend_on_how_many_are_asked_for(count: int, more: int) -> None:
    ids = torch.arange(3)
    few = DRAW.normal("eps", ids, (count,), torch.float64)
    assert torch.equal(few, DRAW.normal("eps", ids, (count + more,), torch.float64)[:, :count])


def test_shapes_dtypes_and_empty_batches() -> None:
    ids = torch.arange(4)
    assert DRAW.normal("eps", ids, (2, 3)).shape == (4, 2, 3)
    assert DRAW.normal("eps", ids, ()).shape == (4,)
    assert DRAW.normal("eps", ids, (2,)).dtype == torch.float32
    assert DRAW.normal("eps", ids, (2,), torch.float64).dtype == torch.float64
    assert DRAW.uniform("sigma", ids).dtype == torch.float32
    assert DRAW.integers("labels", ids, 3).dtype == torch.int64
    assert DRAW.normal("eps", ids[:0], (2,)).shape == (0, 2)
    assert DRAW.uniform("sigma", ids[:0]).shape == (0,)


def test_float32_numbers_are_the_float64_ones_rounded() -> None:
    ids = IDS[:1000]
    exact = DRAW.normal("eps", ids, (3,), torch.float64)
    assert torch.equal(DRAW.normal("eps", ids, (3,)), exact.float())


@pytest.mark.parametrize(
    "other",
    [
        Draw(8, 3, "student"),
        Draw(7, 4, "student"),
        Draw(7, 3, "fake_score/0"),
        Draw(73, 0, "student"),
    ],
    ids=repr,
)
def test_seeds_cycles_and_phases_give_unrelated_numbers(other: Draw) -> None:
    ids = IDS[:4000]
    ours, theirs = (d.normal("eps", ids, (), torch.float64) for d in (DRAW, other))
    assert not torch.isclose(ours, theirs).any()
    assert abs(torch.corrcoef(torch.stack([ours, theirs]))[0, 1]) < 4 / math.sqrt(4000)


def test_streams_and_neighbouring_samples_are_unrelated() -> None:
    ids = IDS[:4000]
    eps, rollout = (DRAW.normal(s, ids, (), torch.float64) for s in ("eps", "rollout"))
    pairs = [(eps, rollout), (eps[1:], eps[:-1])]
    high = DRAW.normal("eps", ids + 2**32, (), torch.float64)
    for left, right in [*pairs, (eps, high)]:
        assert not torch.isclose(left, right).any()
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 4 / math.sqrt(4000)


def test_all_bits_of_a_sample_id_count() -> None:
    ids = torch.tensor([0, *(2**bit for bit in range(63))])
    assert len(set(DRAW.words("eps", ids, 1)[0, :, 0].tolist())) == 64


def test_the_global_generator_is_neither_read_nor_advanced() -> None:
    def everything() -> list[Tensor]:
        ids = torch.arange(5)
        return [
            DRAW.normal("eps", ids, (3,)),
            DRAW.uniform("sigma", ids),
            DRAW.integers("labels", ids, 10),
            torch.tensor(DRAW.choice("exit", 4)),
            permutation(1, 2, 30),
        ]

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = everything()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1234)
    assert all(torch.equal(a, b) for a, b in zip(first, everything(), strict=True))


def test_a_draw_is_a_value() -> None:
    again = pickle.loads(pickle.dumps(DRAW))
    assert again == DRAW
    assert torch.equal(again.normal("eps", IDS[:5], (2,)), DRAW.normal("eps", IDS[:5], (2,)))


def test_normal_numbers_are_standard_normal() -> None:
    x = DRAW.normal("eps", IDS, (6,), torch.float64)
    count = x.numel()
    assert abs(x.mean()) < 4 / math.sqrt(count)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / count)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / count)
    assert scipy.stats.kstest(x.flatten().numpy(), "norm").pvalue > 1e-3
    # The entries of a sample come in pairs from the same two words.
    correlations = torch.corrcoef(x.T) - torch.eye(6)
    assert correlations.abs().max() < 4.5 / math.sqrt(len(IDS))
    correlations = torch.corrcoef((x**2).T) - torch.eye(6)
    assert correlations.abs().max() < 4.5 / math.sqrt(len(IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uniform_numbers_are_uniform_and_inside_the_open_interval(dtype: torch.dtype) -> None:
    x = DRAW.uniform("sigma", IDS, dtype)
    assert scipy.stats.kstest(x.numpy(), "uniform").pvalue > 1e-3
    assert x.min() > 0
    assert x.max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_extreme_words_stay_inside(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int
) -> None:
    """Numbers that a sample meets once in four thousand million."""

    def words(self: Draw, stream: str, sample_ids: Tensor, count: int) -> Tensor:
        return torch.full((4, len(sample_ids), -(-count // 4)), bits)

    monkeypatch.setattr(Draw, "words", words)
    ids = torch.arange(2)
    uniform = DRAW.uniform("sigma", ids, dtype)
    assert ((uniform > 0) & (uniform < 1)).all()
    assert DRAW.normal("eps", ids, (8,), dtype).isfinite().all()
    assert DRAW.normal("eps", ids, (8,), dtype).abs().max() < 7
    assert DRAW.integers("labels", ids, 10).tolist() == [0 if bits == 0 else 9] * 2


@pytest.mark.parametrize("high", [1, 2, 7, 10])
def test_integers_are_uniform(high: int) -> None:
    x = DRAW.integers("labels", IDS, high)
    counts = torch.bincount(x, minlength=high)
    assert len(counts) == high
    assert high == 1 or scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_choice_is_one_number_for_the_phase_and_uniform_over_cycles() -> None:
    choices = [Draw(0, cycle, "student").choice("exit", 4) for cycle in range(2000)]
    assert choices == [Draw(0, cycle, "student").choice("exit", 4) for cycle in range(2000)]
    counts = torch.bincount(torch.tensor(choices), minlength=4)
    assert len(counts) == 4
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3
    assert {Draw(0, c, "student").choice("exit", 1) for c in range(50)} == {0}


def test_choice_differs_between_streams_and_phases() -> None:
    def sequence(phase: str, stream: str) -> list[int]:
        return [Draw(0, cycle, phase).choice(stream, 4) for cycle in range(100)]

    chosen = [sequence(*k) for k in [("student", "exit"), ("student", "b"), ("fake", "exit")]]
    for i, left in enumerate(chosen):
        for right in chosen[:i]:
            assert 5 < sum(a == b for a, b in zip(left, right, strict=True)) < 45


@given(length=st.integers(0, 300), seed=st.integers(0, 10), epoch=st.integers(0, 10))
@settings(max_examples=50, deadline=None)
def test_permutation_holds_every_item_once(length: int, seed: int, epoch: int) -> None:
    order = permutation(seed, epoch, length)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(length))
    assert torch.equal(order, permutation(seed, epoch, length))


def test_permutation_is_keyed_by_seed_and_epoch() -> None:
    order = permutation(0, 0, 1000)
    for other in (permutation(1, 0, 1000), permutation(0, 1, 1000), torch.arange(1000)):
        assert (order == other).sum() < 10
        assert abs(scipy.stats.spearmanr(order, other).statistic) < 0.15


def test_every_permutation_of_three_is_equally_likely() -> None:
    orders = [tuple(permutation(0, epoch, 3).tolist()) for epoch in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
