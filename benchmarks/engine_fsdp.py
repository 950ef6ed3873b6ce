"""Time per cycle on two ranks: our engine under FSDP2 against a hand-written loop under FSDP2.

Processor time is given beside elapsed time: on a machine with other work, two ranks mostly wait
for each other, and elapsed time says little.
"""

import copy
import time

import torch
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.engine import PlainLoop
from benchmarks.ranks import on_ranks
from benchmarks.setup import NETWORKS, STORAGES, alternate_by, digits_worker
from fewstep.parallel.ranks import Ranks
from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import run_cycle
from fewstep.training.worker import Worker

ROUNDS = 24  # of one cycle each: both leave at the same exit steps in it


def plain_loop(whole: Worker, ranks: Ranks) -> PlainLoop:
    """The plain loop with its networks cut by hand, and a rank's part of the batch.

    Optimizers, clipping (`clip_grad_norm_`) and the average work on the DTensors, as they do in a
    script that has called `fully_shard` and changed nothing else.
    """
    mesh = init_device_mesh("cpu", (ranks.size,))

    def cut(networks: dict[str, nn.Module]) -> dict[str, nn.Module]:
        networks = copy.deepcopy(networks)
        for network in networks.values():
            for block in whole.roles.model.blocks(network).values():
                fully_shard(block, mesh=mesh)
            fully_shard(network, mesh=mesh, reshard_after_forward=True)
        return networks

    return PlainLoop(whole, cut, batch=whole.settings.batch_size // ranks.size)


def compare(ranks: Ranks, storage: str, network: str) -> list[tuple[float, float, float]]:
    """Median seconds per cycle of engine and plain loop, and the median ratio.

    By the clock first, then of this rank's processor.
    """
    plain = plain_loop(digits_worker(storage, network), ranks)
    worker = digits_worker(storage, network, ["parallel.kind=fsdp2"], ranks)
    counters = [0, 0]
    k, settings = worker.method.fake_updates_per_student, CycleSettings()

    def ours() -> None:
        counters[0] += 1
        run_cycle(worker, counters[0], k, settings)

    def theirs() -> None:
        counters[1] += 1
        plain.run_cycle(counters[1])

    torch.manual_seed(ranks.rank)
    clocks = (time.perf_counter, time.process_time)
    return alternate_by(clocks, ours, theirs, ROUNDS)


def compare_all(ranks: Ranks) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """Both storages on both networks."""
    return {(n, s): compare(ranks, s, n) for n in NETWORKS for s in STORAGES}


def run() -> Table:
    """The table; the goal is a ratio of at most 1.08."""
    table = Table(title="FSDP2 on 2 ranks: engine against a plain loop, a cycle (goal <= 1.08)")
    left = ("network", "storage")
    of_processor = ("engine, CPU ms", "plain loop, CPU ms", "CPU ratio")
    for name in (*left, "engine, ms", "plain loop, ms", "ratio", *of_processor):
        table.add_column(name, justify="left" if name in left else "right")
    for (network, storage), clocks in on_ranks(compare_all)[0].items():
        cells = []
        for ours, theirs, ratio in clocks:
            cells += [f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{ratio:.3f}"]
        table.add_row(network, storage, *cells)
    return table
