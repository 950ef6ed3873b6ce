"""Where the time of a cycle goes in two trainer groups with rollout workers, against one group.

Both runs train the same cycles in turns, the fake score first in each. What the groups did comes
from the run's timeline, as in the series "timing" of `metrics.jsonl`.
"""

import statistics
import time

from rich.table import Table

from benchmarks.ray_overhead import NETWORKS
from benchmarks.ray_setup import (
    FAKE_SCORE_FIRST,
    ON_RAY,
    TWO_GROUPS,
    OpenRun,
    cluster_for,
    counted,
    open_run,
    processor_clock,
    recipe_of,
)
from benchmarks.setup import alternate_by

ROUNDS = 10  # of one cycle each
WORKERS = 2
PARTS = (
    "rollout",
    "train_critic",
    "wait_critic",
    "score",
    "train_actor",
    "wait_actor",
    "wait_rollout",
    "hand_off",
    "push",
    "driver",
)


def timing(run: OpenRun, cycles: range) -> dict[str, float]:
    """Medians over cycles of what `Timeline.cycle_values` gives."""
    values = [run.timeline.cycle_values(cycle) for cycle in cycles]
    return {key: statistics.median(v[key] for v in values) for key in values[0]}


def where_it_goes(found: dict[str, float], samples: int, network: str) -> Table:
    """Seconds and shares of the parts of a cycle, and the bytes that pass between groups."""
    title = f"{network}: a cycle of two groups, {WORKERS} rollout workers: where its time goes"
    table = Table(title=f"{title} (goal for driver < 2%)")
    for name in ("part", "ms", "% of the cycle", "KiB", "bytes a sample"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part in PARTS:
        seconds, size = found[f"{part}_seconds"], found.get(f"{part}_bytes")
        moved = ["", ""]
        if size is not None:
            moved = [f"{size / 1024:.0f}", f"{size / samples:.0f}" if part == "hand_off" else ""]
        share = 100 * seconds / found["seconds"]
        table.add_row(part, f"{1e3 * seconds:.1f}", f"{share:.1f}", *moved)
    table.add_row("cycle", f"{1e3 * found['seconds']:.0f}", "100", "", "")
    return table


def compare(network: str) -> tuple[list[tuple[float, float, float]], Table]:
    """Two groups against one by both clocks, and where the time of two goes."""
    model = NETWORKS[network]
    one = recipe_of("independent", [*ON_RAY, FAKE_SCORE_FIRST], model)
    two = recipe_of("independent", [*ON_RAY, *TWO_GROUPS, f"rollout.workers={WORKERS}"], model)
    with cluster_for(2), open_run(two) as in_two, open_run(one) as in_one:
        runs = counted(in_two.run_cycle), counted(in_one.run_cycle)
        runs[0](), runs[1]()
        found = alternate_by((time.perf_counter, processor_clock()), *runs, ROUNDS)
        parts = timing(in_two, range(3, ROUNDS + 3))
    phases = two.method.build().fake_updates_per_student + 1
    return found, where_it_goes(parts, two.train.batch_size * phases, network)


def run() -> list[Table]:
    """Both runs side by side, then the parts of a cycle of two groups, by network."""
    table = Table(title="Two groups on Ray against one, a cycle")
    left = ("network", "clock")
    for name in (*left, "two groups, ms", "one group, ms", "ratio"):
        table.add_column(name, justify="left" if name in left else "right")
    tables = [table]
    for network in NETWORKS:
        clocks, parts = compare(network)
        for name, (ours, theirs, ratio) in zip(("elapsed", "processors"), clocks, strict=True):
            numbers = (f"{1e3 * ours:.0f}", f"{1e3 * theirs:.0f}", f"{ratio:.3f}")
            table.add_row(network, name, *numbers)
        tables.append(parts)
    return tables
