"""How `fewstep plan` shows memory, and what it says of a recipe that does not fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table

from fewstep.budget import (
    Estimator,
    least_bytes,
    memory_there_is,
    samples_of,
    spread_of,
)
from fewstep.config import Recipe
from fewstep.errors import UserError
from fewstep.memory import (
    GIGABYTE,
    Devices,
    Held,
    RankMemory,
    Spread,
    optimizer_bytes,
    whole_bytes,
)
from fewstep.models.model import Model
from fewstep.parallel.ranks import Ranks
from fewstep.remedies import Remedy, remedies

USUAL = (1, 2, 8)
MEGABYTE = 10**6
BASE = "frozen base"
LOOK: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
# What is shown of a rank: name of the line, its bytes, whether it is an estimate.
LINES: tuple[tuple[str, Callable[[RankMemory], int | None], bool], ...] = (
    ("frozen weights, and the average", lambda m: m.frozen, False),
    ("trained weights", lambda m: m.trained, False),
    ("buffers, whole everywhere", lambda m: m.buffers, False),
    ("optimizers", lambda m: m.optimizer, False),
    ("gradients of one role", lambda m: m.gradients, False),
    ("gradients on their way", lambda m: m.communication, False),
    ("rollout workers", lambda m: m.rollout, False),
    ("gathered units", lambda m: m.units, True),
    ("weights in lower precision", lambda m: m.copies, True),
    ("activations", lambda m: m.activations, True),
    ("autoencoder, to validate", lambda m: m.decoder, False),
    ("images, in place of activations", lambda m: m.images, True),
    ("CUDA, fragments", lambda m: m.reserve, True),
)


def plan_memory(recipe: Recipe, devices: Devices | None) -> tuple[RenderableType, str | None]:
    """The memory of a recipe's roles and ranks, before anything is loaded.

    Args:
        recipe: of the run.
        devices: those that there are; None: ranks of 1, 2 and 8 devices are shown.

    Returns:
        What to print, and why the recipe cannot be run on the devices; None where it can.

    Raises:
        UserError: where the structure of the network is not known, or the recipe cannot be divided
            among the devices.
    """
    estimator = Estimator(recipe)
    counts = [devices.count] if devices is not None else _usual(recipe)
    if counts[0] > recipe.train.batch_size:
        raise UserError(
            f"{'parallel.shard_size' if devices is None else '--gpus'}: {counts[0]} are given, but "
            f"train.batch_size is {recipe.train.batch_size}: each rank needs a sample at least"
        )
    memories = {n: estimator.on(n) for n in counts}
    parts: list[RenderableType] = [roles_table(estimator), "", ranks_table(recipe, memories)]
    parts += ["", *_notes(recipe, memories)]
    if devices is None:
        return Group(*parts), None
    memory = memories[devices.count]
    fits, left = memory.total <= devices.bytes, devices.bytes - memory.total
    given = f"{devices.count} x {_amount(devices.bytes)}"
    if fits:
        parts.append(f"[bold green]Fits[/bold green] on {given}, with {_amount(left)} left.")
        return Group(*parts), None
    verdict = f"the recipe does not fit on {given}: {_shortage(memory, devices.bytes)}"
    parts.append(f"[bold red]Does not fit[/bold red] on {given}: {advice(estimator, devices)}")
    return Group(*parts), verdict


def _usual(recipe: Recipe) -> list[int]:
    """How many devices are shown where none are given."""
    size = recipe.parallel.shard_size or 1
    return [n for n in USUAL if n % size == 0 and n <= recipe.train.batch_size] or [size]


def roles_table(estimator: Estimator) -> Table:
    """Every role's own tensors, whole: on one device that holds all of them."""
    unit, size = _unit(sum(whole_bytes(held) for held in estimator.held.values()))
    table = Table(title=f"Memory of the roles, whole, {unit}", **LOOK)
    several = len(estimator.held) > 1
    for name in ("role", "network"):
        table.add_column(name, no_wrap=True)
    for name in ("parameters", "weights", "gradients", "optimizer"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = Spread("none", 1)
    for group, held in estimator.held.items():
        for (role, network), mine in _by_role(held).items():
            trained = [h for h in mine if h.trained]
            sizes = (
                whole_bytes(mine),
                whole_bytes(trained),
                optimizer_bytes(mine, whole) if trained else 0,
            )
            table.add_row(
                f"{group}/{role}" if several else role,
                network,
                f"{sum(h.numbers for h in mine):,}",
                *(f"{s / size:.2f}" if s else "" for s in sizes),
            )
    return table


def ranks_table(recipe: Recipe, memories: Mapping[int, RankMemory]) -> Table:
    """What the fullest rank of so many devices needs."""
    unit, size = _unit(max(memory.needed for memory in memories.values()))
    table = Table(title=f"Memory of a rank, {unit}", **LOOK)
    table.add_column("what", no_wrap=True)
    for ranks in memories:
        kind = spread_of(recipe, ranks).kind
        devices = "1 GPU" if ranks == 1 else f"{ranks} GPUs"
        name = devices if kind == "none" else f"{devices}, {kind}"
        table.add_column(name, justify="right", no_wrap=True)
    for name, value, estimated in LINES:
        found = [value(memory) for memory in memories.values()]
        if any(v is None or v > 0 for v in found):
            cells = ["?" if v is None else f"{v / size:.2f}" for v in found]
            table.add_row(f"{name} (estimate)" if estimated else name, *cells)
    table.add_section()
    totals = [f"{memory.total / size:.2f}" for memory in memories.values()]
    table.add_row("all, at most", *totals, style="bold")
    if any(memory.main_memory for memory in memories.values()):
        away = [f"{memory.main_memory / size:.2f}" for memory in memories.values()]
        table.add_row("in main memory", *away)
    return table


def advice(estimator: Estimator, devices: Devices) -> str:
    """What is missing, and what would make the recipe fit."""
    memory = estimator.on(devices.count)
    found = remedies(estimator, devices)
    lines = [_shortage(memory, devices.bytes)]
    if found:
        one = "Any one of these would make it fit:" if len(found) > 1 else "This would make it fit:"
        lines += [one, *(f"  {_describe(remedy, devices)}" for remedy in found)]
    else:
        lines.append(
            "Activation checkpointing, bfloat16, one sample at a time, LoRA and 64 GPUs together "
            "would not make it fit; take a smaller network or larger devices"
        )
    return "\n".join(lines)


def refusal(estimator: Estimator, ranks: int, there_is: int, where: str) -> str:
    """Why a run is refused before anything is loaded, with the table.

    Args:
        estimator: of the run.
        ranks: that share it.
        there_is: bytes that each may use.
        where: what has so many bytes.
    """
    memory = estimator.on(ranks)
    text = StringIO()
    console = Console(file=text, width=100, highlight=False)
    console.print(ranks_table(estimator.recipe, {ranks: memory}))
    words = advice(estimator, Devices(ranks, there_is))
    return f"memory: the run does not fit on {where}: {words}\n\n{text.getvalue().rstrip()}"


def check_memory(recipe: Recipe, model: Model, ranks: Ranks) -> None:
    """Refuse a run that cannot fit, before its weights are read.

    On a CUDA device all that is estimated must fit into what is free now. In main memory only what
    is kept must, into all there is: what comes and goes may be swapped, slow as that is.

    Raises:
        UserError: with the table, and what would help.
    """
    there_is = memory_there_is(ranks.device)
    if there_is is None:
        return
    launch = recipe.launch.model_copy(update={"processes": ranks.size})
    recipe, where = recipe.model_copy(update={"launch": launch}), f"{ranks.device}"
    try:
        if ranks.device.type == "cpu":
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            there_is, where = there_is // processes, "its part of this machine's main memory"
            if least_bytes(recipe, model) <= there_is:
                return
        estimator = Estimator(recipe, model)
        memory = estimator.on(ranks.size)
    except (RuntimeError, NotImplementedError, TypeError, MemoryError):
        return  # building it in earnest will say what is wrong with the network
    needed = memory.kept if ranks.device.type == "cpu" else memory.needed
    if needed > there_is:
        raise UserError(refusal(estimator, ranks.size, there_is, f"{where}, {_amount(there_is)}"))


def _by_role(held: Sequence[Held]) -> dict[tuple[str, str], list[Held]]:
    """Tensors by role and network, buffers last; a base that is no role's has a name too."""
    found: dict[tuple[str, str], list[Held]] = {}
    for h in held:
        role = "buffers" if h.role is None else h.role
        name = BASE if role == h.network == "base" else role
        found.setdefault((name, "" if h.role is None else h.network), []).append(h)
    return dict(sorted(found.items(), key=lambda item: item[0][0] == "buffers"))


def _shortage(memory: RankMemory, there_is: int) -> str:
    return f"needs {_amount(memory.total)} on each, {_amount(memory.total - there_is)} more."


def _describe(remedy: Remedy, devices: Devices) -> str:
    left = devices.bytes - remedy.memory.total
    return f"{remedy.words}: {_amount(remedy.memory.total)}, {_amount(left)} left"


def _notes(recipe: Recipe, memories: Mapping[int, RankMemory]) -> list[str]:
    samples = ", ".join(str(samples_of(recipe, ranks)) for ranks in memories)
    notes = [f"Samples of a micro-batch on a rank: {samples}."]
    if any(m.activations is None for m in memories.values()):
        notes.append(
            "Activations are not known: this network can only be called with real weights. They "
            "are missing from the sums."
        )
    if hasattr(recipe.model, "pipeline"):
        notes.append("Text encoders are not there: data are encoded beforehand.")
    return notes


def _amount(size: int) -> str:
    unit, one = _unit(size)
    return f"{size / one:.2f} {unit}"


def _unit(size: int) -> tuple[str, int]:
    return ("GB", GIGABYTE) if size >= GIGABYTE else ("MB", MEGABYTE)
