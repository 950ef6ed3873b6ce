"""What it costs to give the rollout workers a student: a whole network against its adapter.

A DiT of 104 million parameters in shards on two ranks, two rollout workers. A push gathers the
tensors, hands them over through Ray's object store, and proves by SHA-256 of both sides that they
have arrived; the hash is timed by itself as well, over as many bytes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table

from benchmarks import memory_sharded
from benchmarks.memory_sharded import CHANGES, MIB
from benchmarks.ray_setup import (
    ON_RAY,
    TWO_GROUPS,
    OpenRun,
    cluster_for,
    open_run,
    processor_clock,
    recipe_of,
)
from benchmarks.setup import STORAGES
from fewstep.models.dit import DiTSettings
from fewstep.weights import Checksum

# Four tokens: the weights are what matters here, and the samples are to cost little.
NETWORK = memory_sharded.NETWORK.model_copy(update={"sample_size": 4})
WORKERS = 2
ROUNDS = 5


@dataclass(frozen=True)
class Push:
    """Medians of giving weights away.

    Attributes:
        size: bytes, once; each worker gets all of them.
        seconds: until all workers have confirmed.
        processor: seconds of all processes.
        gather: seconds in which the group gathers, copies and hashes.
        checksum: seconds of one hash of as many bytes.
    """

    size: float
    seconds: float
    processor: float
    gather: float
    checksum: float


def recipe_changes(storage: str) -> list[str]:
    """Two groups of FSDP2 ranks, with as little work as may be in a cycle."""
    changes = [c for c in CHANGES if storage == "shared_base" or not c.startswith("lora")]
    return [*ON_RAY, *TWO_GROUPS, *changes, "parallel.kind=fsdp2", f"rollout.workers={WORKERS}"]


def median_seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    """Of some rounds, by a clock; the first, which warms up, is left out."""
    times = []
    for _ in range(ROUNDS + 1):
        began = clock()
        function()
        times.append(clock() - began)
    return statistics.median(times[1:])


def hash_bytes(tensor: torch.Tensor) -> None:
    """What each side does with what it has."""
    checksum = Checksum()
    checksum.add("", tensor)
    checksum.hexdigest()


def measure(run: OpenRun) -> Push:
    """Push the student a few times."""
    actor, pool = run.groups["actor"], run.pool
    assert pool is not None
    run.run_cycle(1)
    found, processors = [], processor_clock()
    for number in range(2, ROUNDS + 3):
        push = partial(actor.push, "student", run.recipe.rollout.bucket_mib, number)
        began, used = time.perf_counter(), processors()
        pool.deliver(push, number)
        seconds, processor = time.perf_counter() - began, processors() - used
        values = run.timeline.cycle_values(number)
        found.append((values["push_bytes"], seconds, processor, values["push_seconds"]))
    size, seconds, processor, gather = (statistics.median(v) for v in zip(*found[1:], strict=True))
    same = torch.zeros(int(size), dtype=torch.uint8)
    hashed = median_seconds(lambda: hash_bytes(same), time.perf_counter)
    return Push(size, seconds, processor, gather, hashed)


def run() -> Table:
    """The table; each side hashes once, one after the other."""
    table = Table(title=f"A push of the student to {WORKERS} rollout workers")
    numbers = ("MiB", "seconds", "CPU s", "gather and hash, s", "one hash, s", "2 hashes, %")
    for name in ("storage", *numbers):
        table.add_column(name, justify="left" if name == "storage" else "right")
    for storage in STORAGES:
        recipe = recipe_of(storage, recipe_changes(storage), DiTSettings(network=NETWORK))
        with cluster_for(1), open_run(recipe) as opened:
            found = measure(opened)
        table.add_row(
            storage,
            f"{found.size / MIB:.1f}",
            f"{found.seconds:.3f}",
            f"{found.processor:.2f}",
            f"{found.gather:.3f}",
            f"{found.checksum:.3f}",
            f"{200 * found.checksum / found.seconds:.0f}",
        )
    return table
