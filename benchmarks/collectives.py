"""Collectives of a cycle under FSDP2, as torch's profiler records them, and the least possible."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.ranks import on_ranks
from benchmarks.scaling_model import (
    Network,
    Plan,
    cycle_passes,
    gathered_bytes,
    gathers,
    scattered_bytes,
    scatters,
    scoring_passes,
)
from benchmarks.setup import digits_worker
from fewstep.diffusion.draw import Draw
from fewstep.parallel.ranks import Ranks
from fewstep.roles.role import FAKE_SCORE, STUDENT, STUDENT_EMA
from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import run_cycle
from fewstep.training.worker import Worker

NETWORK = "4 layers, patch 2"
COMMON = (
    "parallel.kind=fsdp2",
    "train.batch_size=8",
    "method.guidance=2.0",  # so that the teacher is called twice
)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    # title -> storage and changes of the recipe
    "independent": ("independent", ()),
    "independent, recomputing": ("independent", ("runtime.activation_checkpointing=true",)),
    "independent, 2 micro-batches": ("independent", ("train.micro_batch_size=2",)),
    "shared, separate scores": ("shared_base", ()),
    "shared, fused scores": ("shared_base", ("method.score_batching=fused",)),
}
HYBRID = {"independent, hybrid 2 x 2": ("independent", ("parallel.shard_size=2",))}  # 4 ranks
CYCLE = 3  # an earlier one warms up


@dataclass(frozen=True)
class Traffic:
    """Collectives of one rank in one cycle; bytes are those of the whole (gathered) tensors.

    Attributes:
        gathers: all-gathers of units.
        gathered: their bytes.
        scatters: reduce-scatters of units.
        scattered: their bytes.
        reduces: all-reduces between replicas.
        small: the engine's own.
        small_bytes: what a rank gives to them.
    """

    gathers: int
    gathered: int
    scatters: int
    scattered: int
    reduces: int
    small: int
    small_bytes: int


@dataclass(frozen=True)
class Found:
    """What a case gave.

    Attributes:
        measured: by the profiler.
        least: what is possible.
        predicted: by the model of `docs/scaling.md`.
    """

    measured: Traffic
    least: Traffic
    predicted: Traffic


def measure_all(ranks: Ranks, cases: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, Found]:
    """What the cases give, by their titles."""
    return {title: measure(ranks, *case) for title, case in cases.items()}


def measure(ranks: Ranks, storage: str, changes: Sequence[str]) -> Found:
    """Profile one cycle."""
    worker = digits_worker(storage, NETWORK, [*COMMON, *changes], ranks)
    k, settings = worker.method.fake_updates_per_student, CycleSettings()
    run_cycle(worker, CYCLE - 1, k, settings)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run_cycle(worker, CYCLE, k, settings)
    return Found(counted(recorded.events()), least(worker), predicted(worker))


def counted(events: Sequence[FunctionEvent]) -> Traffic:
    """The collectives among a profiler's events. Units are float32, the engine's sums float64."""

    def sizes(name: str, argument: int) -> list[int]:
        return [e.input_shapes[argument][0] for e in events if e.name == name]

    gathered, scattered = (
        sizes("c10d::_allgather_base_", 0),
        sizes("c10d::_reduce_scatter_base_", 1),
    )
    # Gloo's own record has the size of what `all_gather` was given; those of units are in it too.
    given = sizes("gloo:all_gather", 0)
    small = sum(e.name == "c10d::allgather_" for e in events)
    of_units = sum(sizes("c10d::_allgather_base_", 1))
    return Traffic(
        gathers=len(gathered),
        gathered=4 * sum(gathered),
        scatters=len(scattered),
        scattered=4 * sum(scattered),
        reduces=sum(e.name == "c10d::allreduce_" for e in events),
        small=small,
        small_bytes=8 * (sum(given) - of_units),
    )


def least(worker: Worker) -> Traffic:
    """The least that a cycle of this worker can do, if nothing stays gathered after a pass.

    A pass gathers each unit once, and of a shared base only the adapter in force. The student
    phase passes forward at each step before the exit, forward and backward at the exit, and
    through the scores; a fake_score phase at each step before the exit, at the exit, and forward
    and backward for its loss. A phase reduces each unit's trained gradients once, and agrees once
    on whether to step.
    """
    plan, (student, fakes) = plan_of(worker), exits(worker, CYCLE)
    units = unit_sizes(worker)
    base, adapter = sum(u["base"] for u in units), sum(u["adapter"] for u in units)
    shared = plan.storage == "shared_base"
    passes = cycle_passes(student, fakes, plan)
    # The teacher needs no adapter; fused with it, the fake score still needs its own.
    bare = scoring_passes(plan.scoring, plan.guided) - 1
    numbers = passes * base + ((passes - bare) * adapter if shared else 0)
    phases = 1 + plan.fake_updates
    trained = phases * (adapter if shared else base)
    replicated = plan.ranks > plan.shard_size
    return Traffic(
        gathers=int(gathers(len(units), passes, plan)),
        gathered=int(4 * numbers) * plan.micro_batches,
        scatters=scatters(len(units), plan),
        scattered=4 * trained,
        reduces=scatters(len(units), plan) if replicated else 0,
        small=phases,
        small_bytes=8 * phases * 2,  # the loss and the gradients' norm
    )


def predicted(worker: Worker) -> Traffic:
    """What the model of `docs/scaling.md` says of a cycle of this worker."""
    plan, (student, fakes) = plan_of(worker), exits(worker, CYCLE)
    units = unit_sizes(worker)
    base, adapter = sum(u["base"] for u in units), sum(u["adapter"] for u in units)
    plan = replace(plan, lora_share=adapter / base)
    network = Network(base, len(units), largest_unit=max(u["base"] for u in units))
    passes = cycle_passes(student, fakes, plan)
    return replace(
        least(worker),
        gathers=int(gathers(len(units), passes, plan)),
        gathered=round(gathered_bytes(network, passes, plan)),
        scatters=scatters(len(units), plan),
        scattered=round(scattered_bytes(network, plan)),
    )


def plan_of(worker: Worker) -> Plan:
    """What the model of communication needs to know of a worker."""
    method, ranks = worker.method.settings, worker.ranks.size
    mine = worker.settings.batch_size // ranks
    return Plan(
        storage=worker.roles.storage.kind,
        scoring=method.score_batching,
        ranks=ranks,
        shard_size=ranks // worker.sharding.replicas,
        batch=mine,
        micro_batches=mine // min(mine, worker.settings.micro_batch_size or mine),
        steps=method.steps,
        fake_updates=method.fake_updates_per_student,
        guided=method.guidance != 1,
        gather_bytes=4,
    )


def exits(worker: Worker, cycle: int) -> tuple[int, list[int]]:
    """Steps at which the student leaves, in the student phase and in each fake_score phase."""
    names = [STUDENT, *(f"{FAKE_SCORE}/{k}" for k in range(worker.method.fake_updates_per_student))]
    steps = len(worker.method.sigmas)
    student, *fakes = (Draw(worker.seed, cycle, name).choice("exit", steps) for name in names)
    return student, fakes


def unit_sizes(worker: Worker) -> list[dict[str, int]]:
    """Parameters of each unit of a network: of its base, and of one adapter."""
    storage = worker.roles.storage
    network = storage.networks[storage.network_of(STUDENT)]
    blocks = list(worker.roles.model.blocks(network))
    others = {*worker.roles[FAKE_SCORE].parameters, *worker.roles[STUDENT_EMA].parameters}
    found = [{"base": 0, "adapter": 0} for _ in [*blocks, "the rest"]]
    for name, parameter in network.named_parameters():
        place = next((i for i, b in enumerate(blocks) if name.startswith(f"{b}.")), len(blocks))
        if storage.kind == "independent":
            found[place]["base"] += parameter.numel()
        elif name in worker.roles[STUDENT].parameters:
            found[place]["adapter"] += parameter.numel()
        elif name not in others:
            found[place]["base"] += parameter.numel()
    return found


def why(title: str, found: Found) -> str:
    """Where a case does more than the least, and why."""
    reasons = []
    if found.measured.gathers > found.least.gathers:
        reasons.append("units fetched ahead for nothing")
    if found.measured.gathered > 1.001 * found.least.gathered:
        reasons.append("gathers: adapters not in force" if "shared" in title else "gathers: ?")
    if found.measured.small_bytes > found.least.small_bytes:
        reasons.append("sums: metrics and checks")
    return "; ".join(reasons)


def run() -> Table:
    """The table: measured / least."""
    table = Table(title="Collectives of a cycle of each rank, FSDP2 over gloo: measured / least")
    for name in ("case", "all-gathers", "KiB", "reduce-scatters", "KiB", "all-reduces", "own sums"):
        table.add_column(name, justify="left" if name == "case" else "right")
    table.add_column("bytes", justify="right")
    table.add_column("why more", justify="left")
    results = on_ranks(measure_all, CASES)[0] | on_ranks(measure_all, HYBRID, size=4)[0]
    for title, found in results.items():
        m, n = found.measured, found.least
        pairs = (
            (m.gathers, n.gathers),
            (m.gathered >> 10, n.gathered >> 10),
            (m.scatters, n.scatters),
            (m.scattered >> 10, n.scattered >> 10),
            (m.reduces, n.reduces),
            (m.small, n.small),
            (m.small_bytes, n.small_bytes),
        )
        table.add_row(title, *(f"{a} / {b}" for a, b in pairs), why(title, found))
    return table


def markdown_row(title: str, found: Found) -> str:
    """A row of the table in `docs/scaling.md`: predicted and measured."""
    p, m = found.predicted, found.measured
    pairs = ((p.gathers, m.gathers), (p.scatters, m.scatters), (p.reduces, m.reduces))
    counts = [f"{a} / {b}" for a, b in pairs]
    sizes = ((p.gathered, m.gathered), (p.scattered, m.scattered))
    kib = [f"{a / 1024:.0f} / {b / 1024:.0f}" for a, b in sizes]
    ratios = f"{m.gathered / p.gathered:.4f}"
    return f"| {title} | {counts[0]} | {kib[0]} | {ratios} | {counts[1]} | {kib[1]} | {counts[2]} |"
