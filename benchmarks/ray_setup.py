"""What the benchmarks on Ray share: runs that are open side by side, and what their processes use.

Runs are driven here as the driver drives them, less its hooks (metrics, checkpoints), so that two
can take turns, cycle by cycle. All runs that are open at a time share one cluster on this machine.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import ray

from benchmarks.ranks import on_ranks
from benchmarks.setup import digits_recipe
from fewstep.build import build_worker
from fewstep.config import Recipe
from fewstep.data.conditions import conditions_in_turn
from fewstep.launch.ray.cluster import Cluster
from fewstep.launch.ray.driver import (
    ShippedFromCaller,
    agree,
    place_recipe,
    start_groups,
    start_pool,
)
from fewstep.launch.ray.executor import GroupExecutor
from fewstep.launch.ray.group import TrainerGroup
from fewstep.launch.ray.pool import RolloutPool
from fewstep.launch.ray.underway import Underway
from fewstep.parallel.ranks import Ranks
from fewstep.pretrained import load_weights, resolve_recipe
from fewstep.training.loop import run_cycle
from fewstep.training.timeline import Timeline

PROCESSES = 2  # the size of every group
ON_RAY = ("launch.kind=ray", f"launch.processes={PROCESSES}")
FAKE_SCORE_FIRST = "cycle.order=fake_score_first"
TWO_GROUPS = (
    "placement.groups={critic: [fake_score, teacher_score], actor: [student, student_ema]}",
    FAKE_SCORE_FIRST,
)
NO_WARMUP = "cycle.warmup_cycles=0"
NICENESS = "RAY_worker_niceness"


def recipe_of(storage: str, changes: Sequence[str], model: object = None) -> Recipe:
    """The digits' recipe without warm-up, with another network where one is given."""
    recipe = digits_recipe(storage, changes=[NO_WARMUP, *changes])
    return resolve_recipe(recipe.model_copy(update={"model": model}) if model else recipe)


@contextmanager
def cluster_for(runs: int, niceness: int = 0) -> Iterator[None]:
    """A Ray cluster of this machine, with places for so many runs.

    Args:
        runs: that are open at a time.
        niceness: of Ray's workers. Ray's default of 15 measures what else the machine has to do.
    """
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", NICENESS: str(niceness)}):
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            resources={"accelerator": runs * PROCESSES},
        )
        try:
            yield
        finally:
            ray.shutdown()


@dataclass(frozen=True)
class OpenRun:
    """A run on Ray that waits for its next cycle.

    Attributes:
        recipe: resolved.
        groups: by name.
        pool: the rollout workers, if there are any.
        executor: carries phases to them.
        timeline: what they did when.
    """

    recipe: Recipe
    groups: dict[str, TrainerGroup]
    pool: RolloutPool | None
    executor: GroupExecutor
    timeline: Timeline

    def run_cycle(self, cycle: int) -> None:
        """All phases of one cycle."""
        k = self.recipe.method.build().fake_updates_per_student
        run_cycle(self.executor, cycle, k, self.recipe.cycle)


@contextmanager
def open_run(recipe: Recipe) -> Iterator[OpenRun]:
    """Start a run's processes on the cluster that there is; they end with the context."""
    placement, timeline = place_recipe(recipe), Timeline(None)
    underway = Underway(recipe.launch.timeout_seconds, timeline.extend)
    with Cluster(recipe.launch, placement, recipe.placement.timeout_seconds) as cluster:
        caller = ShippedFromCaller.of(None, None)
        groups = start_groups(cluster, placement, recipe, caller, None, underway)
        agree(groups, None, recipe)
        pool = start_pool(cluster, placement, recipe, caller, None, underway)
        conditions = partial(conditions_in_turn, recipe.model.build().classes, None)
        executor = GroupExecutor(recipe, groups, pool, timeline, 0, conditions)
        yield OpenRun(recipe, groups, pool, executor, timeline)
        executor.leave()


@contextmanager
def ranks_without_ray(recipe: Recipe) -> Iterator[Callable[[int], None]]:
    """The same worker on as many ranks as torchrun would start; gives what runs a cycle there."""
    here, there = zip(*(Pipe() for _ in range(PROCESSES)), strict=True)

    def run(cycle: int) -> None:
        for pipe in here:
            pipe.send(cycle)
        for pipe in here:
            pipe.recv()

    with ThreadPoolExecutor(1) as background:
        ended = background.submit(on_ranks, serve, recipe, there, size=PROCESSES)
        try:
            yield run
        finally:
            for pipe in here:
                pipe.send(None)
            ended.result()


def serve(ranks: Ranks, recipe: Recipe, pipes: Sequence[Connection]) -> None:
    """One rank: runs the cycles whose numbers it is sent, until it is sent None."""
    model, pipe = recipe.model.build(), pipes[ranks.rank]
    worker = build_worker(recipe, model, None, load_weights(recipe, model, ranks), ranks)
    k = worker.method.fake_updates_per_student
    while (cycle := pipe.recv()) is not None:
        run_cycle(worker, cycle, k, recipe.cycle)
        pipe.send(cycle)


def counted(run: Callable[[int], None]) -> Callable[[], None]:
    """Runs the next cycle each time it is called."""
    done = [0]

    def following() -> None:
        done[0] += 1
        run(done[0])

    return following


# --- what processes use -------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """A process and all below it, those of Ray among them."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            found += descendants(int(child))
    return found


def processor_clock() -> Callable[[], float]:
    """Tells the processor time of this process and all that are below it now, Ray's among them.

    They are looked for once: the search takes as long as many calls do, and would be counted.
    """
    files = [Path(f"/proc/{pid}/stat") for pid in descendants(os.getpid())]
    ticks = dict.fromkeys(files, 0)

    def seconds() -> float:
        for file in files:
            with suppress(OSError):  # one that has ended has used what it has used
                fields = file.read_text().rpartition(")")[2].split()
                ticks[file] = int(fields[11]) + int(fields[12])
        return sum(ticks.values()) / os.sysconf("SC_CLK_TCK")

    return seconds
