"""Seconds per cycle of one trainer group on Ray, against the same ranks without Ray.

Both run the same cycles in turns, and both leave at the same exit steps. Ray starts its workers
with niceness 15, so where other work wants the processors, they wait for it; that is no cost of
Ray's calls. So there are rows with niceness 0 as well, and processor time of all processes.
"""

import statistics
import time
from dataclasses import dataclass

from rich.table import Table

from benchmarks.ray_setup import (
    ON_RAY,
    cluster_for,
    counted,
    open_run,
    processor_clock,
    ranks_without_ray,
    recipe_of,
)
from benchmarks.setup import alternate_by
from fewstep.launch.ray.group import TrainerGroup
from fewstep.models.dit import DiTNetwork, DiTSettings

LARGER = DiTSettings(network=DiTNetwork(num_layers=6, num_attention_heads=4, attention_head_dim=24))
NETWORKS = {"demo": None, "6 layers, 1.2M": LARGER}
NICENESSES = (15, 0)
ROUNDS = 12  # of one cycle each
CALLS = 200


@dataclass(frozen=True)
class Found:
    """Medians of one network and niceness.

    Attributes:
        clocks: seconds on Ray and without, and their ratio: by the clock, of the processors.
        call: seconds of a call of all ranks that does nothing.
    """

    clocks: list[tuple[float, float, float]]
    call: float


def empty_call(group: TrainerGroup) -> float:
    """Median seconds of a call of all ranks of a group that does nothing."""
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        group.call("__ray_ready__")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def compare(network: str, niceness: int) -> Found:
    """One network, with Ray's workers at some niceness."""
    plain = recipe_of("independent", [], NETWORKS[network])
    recipe = recipe_of("independent", ON_RAY, NETWORKS[network])
    with (
        ranks_without_ray(plain) as without,
        cluster_for(1, niceness),
        open_run(recipe) as on_ray,
    ):
        call = empty_call(on_ray.groups["trainer"])
        clocks = (time.perf_counter, processor_clock())
        ours, theirs = counted(on_ray.run_cycle), counted(without)
        ours(), theirs()  # twice to warm up: once more by what follows
        return Found(alternate_by(clocks, ours, theirs, ROUNDS), call)


def run() -> Table:
    """The table; the goal is a ratio of at most 1.05."""
    table = Table(title="One group on Ray against 2 ranks without it, a cycle (goal <= 1.05)")
    left = ("network", "niceness")
    numbers = ("Ray, ms", "without, ms", "ratio", "Ray, CPU ms", "without, CPU ms", "CPU ratio")
    for name in (*left, *numbers, "empty call, ms"):
        table.add_column(name, justify="left" if name in left else "right")
    for network in NETWORKS:
        for niceness in NICENESSES:
            found = compare(network, niceness)
            cells = []
            for ours, theirs, ratio in found.clocks:
                cells += [f"{1e3 * ours:.0f}", f"{1e3 * theirs:.0f}", f"{ratio:.3f}"]
            table.add_row(network, str(niceness), *cells, f"{1e3 * found.call:.2f}")
    return table
