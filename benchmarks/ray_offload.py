"""What two groups hold on their accelerators, if they take turns there and if they do not.

`placement.offload` counts on the CPU as on a GPU: there the device's memory and main memory are
the same, so bytes that are resident fall, and the memory of the processes does not.
"""

import statistics
import time
from dataclasses import dataclass

import ray
from rich.table import Table

from benchmarks.memory_sharded import MIB, resident
from benchmarks.ray_push import NETWORK, recipe_changes
from benchmarks.ray_setup import OpenRun, cluster_for, open_run, recipe_of
from fewstep.launch.ray.group import TrainerGroup
from fewstep.models.dit import DiTSettings
from fewstep.training.cycle import plan_cycle

MODEL = DiTSettings(network=NETWORK.model_copy(update={"num_layers": 3}))  # 36 million
CYCLES = 3
TURNS = 5


@dataclass(frozen=True)
class Held:
    """What the trainers of one accelerator hold: rank 0 of each group.

    Attributes:
        groups: highest bytes of weights and optimizers of each group by itself.
        together: highest sum at any one moment.
        main_memory: of all trainer processes, what is resident in main memory at the end.
        cycle: seconds of the last cycle.
        turns: median seconds in which the actor goes to sleep and wakes; None: it never does.
    """

    groups: dict[str, int]
    together: int
    main_memory: int
    cycle: float
    turns: tuple[float, float] | None


def resident_bytes(group: TrainerGroup) -> int:
    """Of rank 0, now."""
    found: int = group.call("resident_bytes")[0]
    return found


def main_memory(group: TrainerGroup) -> int:
    """Of all processes of a group."""
    calls = [actor.__ray_call__.remote(resident_of_process) for actor in group._actors]
    return sum(ray.get(calls))


def resident_of_process(_: object) -> int:
    """Resident memory of the process that is asked."""
    return resident("VmRSS")


def time_turns(group: TrainerGroup) -> tuple[float, float]:
    """Median seconds of sleep and wake of all ranks."""
    asleep, awake = [], []
    group.wake(CYCLES)
    for _ in range(TURNS):
        moments = [time.perf_counter()]
        for move in (group.sleep, group.wake):
            move(CYCLES)
            moments.append(time.perf_counter())
        asleep.append(moments[1] - moments[0])
        awake.append(moments[2] - moments[1])
    return statistics.median(asleep), statistics.median(awake)


def measure(run: OpenRun) -> Held:
    """A few cycles, looking at both groups after every phase."""
    moments: list[dict[str, int]] = []
    k = run.recipe.method.build().fake_updates_per_student
    for cycle in range(1, CYCLES + 1):
        began = time.perf_counter()
        for request in plan_cycle(cycle, k, run.recipe.cycle):
            run.executor.run_phases([request])
            moments.append({name: resident_bytes(g) for name, g in run.groups.items()})
        seconds = time.perf_counter() - began
    return Held(
        {name: max(m[name] for m in moments) for name in run.groups},
        max(sum(m.values()) for m in moments),
        sum(map(main_memory, run.groups.values())),
        seconds,
        time_turns(run.groups["actor"]) if run.recipe.placement.offload else None,
    )


def run() -> Table:
    """The table: with offload, the highest sum is to be that of the larger group."""
    table = Table(title="Weights and optimizers of two groups on one accelerator, MiB")
    numbers = ("critic", "actor", "highest together", "all processes' RSS")
    for name in ("placement.offload", *numbers, "cycle, s", "sleep, s", "wake, s"):
        table.add_column(name, justify="left" if name == "placement.offload" else "right")
    for offload in ("false", "true"):
        changes = [*recipe_changes("independent"), f"placement.offload={offload}"]
        with cluster_for(1), open_run(recipe_of("independent", changes, MODEL)) as opened:
            found = measure(opened)
        sizes = (*found.groups.values(), found.together, found.main_memory)
        turns = [f"{seconds:.2f}" for seconds in found.turns or ()] or ["", ""]
        cells = (*(f"{size / MIB:.0f}" for size in sizes), f"{found.cycle:.2f}", *turns)
        table.add_row(offload, *cells)
    return table
