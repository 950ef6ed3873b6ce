"""Scaling on paper: closed forms, what a real run does, and the tables of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scaling_model as model
from benchmarks import scaling_tables as tables
from benchmarks import scaling_time as time

PAGE = (Path(__file__).parents[1] / "docs/scaling.md").read_text()
NETWORK = model.Network(1000.0, blocks=9, largest_unit=100.0, width=8, tokens=5, flops=1e6)
INDEPENDENT = model.Plan("independent", "separate", ranks=8, shard_size=8)
SHARED = model.Plan("shared_base", "fused", ranks=8, shard_size=8, lora_share=0.1)
MACHINE = time.Machine(
    gpus_a_node=4,
    memory=1e9,
    fast_link=100.0,
    network=10.0,
    link_efficiency=0.5,
    step_seconds=0.25,
    flops=1e6,
    utilisation=0.5,
)


def test_a_one_step_student_without_guidance_passes_as_often_as_one_counts() -> None:
    plan = replace(INDEPENDENT, steps=1, guided=False, fake_updates=1)
    # Student forward and backward, two scores; generation, forward and backward.
    assert model.expected_passes(plan) == 4 + 3


@pytest.mark.parametrize(("scoring", "expected"), [("separate", 6.5), ("fused", 4.5)])
def test_a_student_phase_of_four_steps(scoring, expected) -> None:
    assert model.student_passes(1.5, scoring, guided=True) == expected


def test_the_mean_over_all_exits_is_the_expectation() -> None:
    exits = range(INDEPENDENT.steps)
    fakes = INDEPENDENT.fake_updates
    all_passes = [model.cycle_passes(e, [e] * fakes, INDEPENDENT) for e in exits]
    assert sum(all_passes) / len(all_passes) == model.expected_passes(INDEPENDENT)


def test_memory_of_independent_networks_is_that_of_zero() -> None:
    """Two trained networks: 16 bytes a parameter each (ZeRO, float32), less one's gradients."""
    parts = (model.weight_bytes, model.optimizer_bytes, model.gradient_bytes)
    trained, frozen = 2 * 16 - 4, 2 * 4
    expected = NETWORK.parameters * (trained + frozen) / 8
    assert sum(part(NETWORK, INDEPENDENT) for part in parts) == expected


def test_shards_of_one_rank_are_the_whole() -> None:
    one = replace(SHARED, ranks=1, shard_size=1)
    assert model.weight_bytes(NETWORK, one) == pytest.approx(4 * 1000 * 1.3)
    assert model.optimizer_bytes(NETWORK, one) == pytest.approx(2 * 8 * 100)


def test_micro_batches_gather_again_and_hold_a_whole_gradient() -> None:
    cut = replace(INDEPENDENT, batch=4, micro_batches=4)
    assert model.gathers(10, 3, cut) == 4 * model.gathers(10, 3, INDEPENDENT)
    assert model.scatters(10, cut) == model.scatters(10, INDEPENDENT)
    assert model.gradient_bytes(NETWORK, cut) == 8 * model.gradient_bytes(NETWORK, INDEPENDENT)
    each = replace(cut, reduce_each=True)
    assert model.scatters(10, each) == 4 * model.scatters(10, INDEPENDENT)
    assert model.gradient_bytes(NETWORK, each) == model.gradient_bytes(NETWORK, INDEPENDENT)


def test_recomputing_keeps_inputs_and_one_block() -> None:
    token = 5 * 8 * INDEPENDENT.gather_bytes
    assert model.activation_bytes(NETWORK, INDEPENDENT) == token * (9 + 24)
    assert model.activation_bytes(NETWORK, replace(INDEPENDENT, recompute=False)) == token * 9 * 24


def test_copies_reduce_shards_and_one_copy_does_not() -> None:
    assert model.replica_bytes(NETWORK, INDEPENDENT) == 0
    hybrid = replace(INDEPENDENT, shard_size=4)
    assert model.replica_bytes(NETWORK, hybrid) == 6 * 1000 * 4 / 4


def test_a_ring_takes_its_slowest_link_and_a_latency_each_step() -> None:
    # Inside a node: 3/4 of 400 bytes at half of 100 a second; 2 calls of 3 steps.
    assert time.ring_seconds(400, 2, 4, MACHINE) == 300 / 50 + 2 * 3 * 0.25
    # Through nodes: four cards of 10 together.
    assert time.ring_seconds(400, 2, 8, MACHINE) == 350 / 20 + 2 * 7 * 0.25


def test_arithmetic_counts_backward_twice_or_once_where_the_base_is_frozen() -> None:
    plan = replace(INDEPENDENT, steps=1, guided=False, fake_updates=1, recompute=False)
    assert time.forward_equivalents(plan) == (1 + 2 + 2) + (1 + 1 + 2)
    frozen = replace(plan, storage="shared_base", scoring="fused")
    assert time.forward_equivalents(frozen) == (1 + 1 + 2) + (1 + 1 + 1)
    assert time.compute_seconds(NETWORK, frozen, MACHINE) == 7 * 1e6 / 5e5


def test_the_page_has_the_tables_of_the_model() -> None:
    for table in (tables.memory_table(), tables.variants_table(), tables.time_table()):
        assert table in PAGE


def test_the_text_of_the_page_has_the_numbers_of_the_model() -> None:
    facts = tables.facts()
    for name in ("parameters", "unit", "forward", "adapter"):
        assert facts[name] in PAGE, name
    assert f"as much as {float(facts['independent equivalents']):.0f} forward passes" in PAGE
    assert f"and {float(facts['shared equivalents']):.0f} with a shared base" in PAGE
    passes = [model.expected_passes(tables.plan(s, 8, 8)) for s in ("independent", "shared_base")]
    assert f"{passes[0]:.0f} passes with separate scores, and {passes[1]:.0f} with fused" in PAGE
    whole = replace(tables.plan("independent", 8, 8), micro_batches=2)
    assert f"{model.gradient_bytes(tables.NETWORK, whole) / 1e9:.0f} GB for an independent" in PAGE
    latency = passes[0] * (tables.BLOCKS + 1) * 511 * tables.H100.step_seconds
    assert f"{latency:.1f} seconds a cycle at F = 512" in PAGE


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_real_cycle_makes_the_collectives_that_the_page_says() -> None:
    from benchmarks import collectives
    from benchmarks.ranks import on_ranks

    titles = ("independent", "shared, fused scores")
    cases = {title: collectives.CASES[title] for title in titles}
    for title, found in on_ranks(collectives.measure_all, cases)[0].items():
        assert found.measured.gathers == found.predicted.gathers
        assert found.measured.scatters == found.predicted.scatters
        assert collectives.markdown_row(title, found) in PAGE
