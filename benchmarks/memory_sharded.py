"""Memory of each rank under FSDP2 on two ranks, against what must be there.

Method: the process's highest resident memory (VmHWM of Linux, set back before each measurement)
less what was resident before, on a network large enough (about 100 million parameters) for the
interpreter not to matter. Nothing is sampled, so no peak is missed. The C library is told to map
each larger block by itself, and so to give it back when it is freed. A small run of the same kind
comes first, so that libraries are loaded by then.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.ranks import on_ranks
from benchmarks.scaling_model import (
    Network,
    Plan,
    gradient_bytes,
    optimizer_bytes,
    unit_bytes,
    weight_bytes,
)
from benchmarks.setup import STORAGES, digits_recipe, digits_worker
from fewstep.build import build_worker
from fewstep.config import Recipe
from fewstep.models.dit import DiTNetwork, DiTSettings
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.pretrained import load_weights, resolve_recipe
from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import run_cycle
from fewstep.training.worker import Worker

NETWORK = DiTNetwork(
    sample_size=16,
    in_channels=4,
    patch_size=2,
    num_layers=9,
    num_attention_heads=12,
    attention_head_dim=64,
    num_embeds_ada_norm=10,
)
RANKS, BATCH = 2, 4  # samples of a phase, of both ranks together
MIB = 2**20
GIVE_BACK_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
CHANGES = (
    f"train.batch_size={BATCH}",
    "method.steps=2",
    "method.fake_updates_per_student=1",
    "lora.rank=16",
)


@dataclass(frozen=True)
class Peaks:
    """Bytes of one rank.

    Attributes:
        start: highest while the worker is built.
        kept: resident afterwards.
        cycle: highest in a cycle, once the optimizers have their moments.
    """

    start: int
    kept: int
    cycle: int


def resident(field: str) -> int:
    """Bytes of this process, by a name in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_of(function: Callable[[], None]) -> int:
    """Highest resident memory while a function runs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    function()
    return resident("VmHWM")


def large_recipe(storage: str, directory: str, kind: str) -> Recipe:
    """The digits' recipe with the large network, whose weights are in a directory."""
    changes = [c for c in CHANGES if storage == "shared_base" or not c.startswith("lora")]
    recipe = digits_recipe(storage, changes=[*changes, f"parallel.kind={kind}"])
    model = DiTSettings(weights=directory)
    return resolve_recipe(recipe.model_copy(update={"model": model}))


def cycle(worker: Worker, number: int) -> None:
    """One cycle."""
    run_cycle(worker, number, worker.method.fake_updates_per_student, CycleSettings())


def measure(ranks: Ranks, storage: str, directory: str, kind: str) -> Peaks:
    """Build a worker from a directory that diffusers wrote, and run two cycles."""
    small = [f"parallel.kind={kind}", "train.batch_size=4"]
    cycle(digits_worker(storage, "demo", small, ranks), 1)
    gc.collect()
    before = resident("VmRSS")
    recipe = large_recipe(storage, directory, kind)
    model = recipe.model.build()
    built: list[Worker] = []

    def build() -> None:
        built.append(build_worker(recipe, model, None, load_weights(recipe, model), ranks))

    start = peak_of(build)
    gc.collect()
    kept = resident("VmRSS")
    if kind == "none":
        return Peaks(start - before, kept - before, 0)
    cycle(built[0], 1)
    return Peaks(start - before, kept - before, peak_of(lambda: cycle(built[0], 2)) - before)


def saved_bytes(network: nn.Module, recipe: Recipe, samples: int) -> int:
    """Bytes that the student's forward pass keeps for its backward pass, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    model = recipe.model.build()
    x = torch.randn(samples, *model.sample_shape)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.forward(network, x, torch.rand(samples), model.example_condition(samples))
    return sum(found.values())


def on_paper(storage: str, directory: str) -> dict[str, float]:
    """Bytes that must be there on a rank, by kind, and what FSDP2 holds beyond one unit."""
    recipe = large_recipe(storage, directory, "none")
    worker = build_worker(
        recipe, model := recipe.model.build(), None, load_weights(recipe, model), SINGLE
    )
    roles = worker.roles
    network = roles.storage.networks[roles.storage.network_of("student")]
    teacher, student = roles["teacher_score"], roles["student"]
    inside = [sum(p.numel() for p in b.parameters()) for b in model.blocks(network).values()]
    rest = sum(p.numel() for p in network.parameters()) - sum(inside)
    share = student.parameter_count / teacher.parameter_count
    shared = storage == "shared_base"
    largest = max(*inside, rest) / (1 + 3 * share if shared else 1)
    plan = Plan(storage, "separate", RANKS, RANKS, lora_share=share, gather_bytes=4)
    paper = Network(teacher.parameter_count, len(inside) + 1, largest)
    with roles.use("student"):
        activations = saved_bytes(network, recipe, BATCH // RANKS)
    unit = largest * (1 + 3 * share if shared else 1) * 4
    return {
        "weights": weight_bytes(paper, plan),
        "optimizer": optimizer_bytes(paper, plan),
        "gradients": gradient_bytes(paper, plan),
        "one unit": unit,
        "activations": activations,
        "buffers": unit_bytes(paper, plan) - unit,
    }


def tables(columns: Sequence[str], title: str) -> Table:
    """An empty table of numbers in MiB."""
    table = Table(title=title)
    for name in ("storage", *columns):
        table.add_column(name, justify="left" if name == "storage" else "right")
    return table


def run() -> list[Table]:
    """Two tables: a cycle, and the start of a run."""
    parts = ("weights", "optimizer", "gradients", "one unit", "activations")
    title = "Memory of a rank in a cycle, MiB, FSDP2 on 2 ranks: measured against its parts"
    in_cycle = tables((*parts, "sum", "+ buffers", "measured", "over sum"), title)
    title = "Memory of a rank at the start, MiB: from a diffusers directory to a worker"
    columns = ("shards + one unit", "highest, rank 0", "rank 1", "kept", "whole: highest")
    at_start = tables(columns, title)
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, GIVE_BACK_MEMORY):
        model = DiTSettings(network=NETWORK).build()
        model.save_network(model.build_network(), Path(directory))
        for storage in STORAGES:
            paper = on_paper(storage, directory)
            gc.collect()
            first, second = on_ranks(measure, storage, directory, "fsdp2")
            whole = on_ranks(measure, storage, directory, "none")[1]
            least = sum(paper[p] for p in parts)
            numbers = [*(paper[p] for p in parts), least, least + paper["buffers"], first.cycle]
            ratio = f"{first.cycle / least:.2f}"
            in_cycle.add_row(storage, *(f"{n / MIB:.0f}" for n in numbers), ratio)
            ideal = paper["weights"] + paper["one unit"]
            numbers = [ideal, first.start, second.start, second.kept, whole.start]
            at_start.add_row(storage, *(f"{n / MIB:.0f}" for n in numbers))
    return [in_cycle, at_start]
