"""What `fewstep inspect` shows of a recipe, a run or a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from safetensors import safe_open

from fewstep.build import build_roles, build_storage
from fewstep.checkpoint import (
    TENSORS,
    checkpoint_cycle,
    complete_checkpoints,
    latest_checkpoint,
    read_best,
    read_manifest,
    read_state,
    saved_tensors,
    verify_checkpoint,
    verify_state,
)
from fewstep.config import Recipe, dump_recipe, load_recipe
from fewstep.models.model import Model
from fewstep.models.module import ModuleSettings
from fewstep.pretrained import RECIPE, check_run_directory, resolve_recipe
from fewstep.roles.role import STUDENT_EMA, Roles
from fewstep.training.cycle import plan_cycle
from fewstep.training.state import load_counters

MEBIBYTE = 2**20


def inspect_recipe(recipe: Recipe) -> RenderableType:
    """A recipe before it is run; networks are built without memory for their weights."""
    recipe = resolve_recipe(recipe)
    model = recipe.model.build()
    recipe.method.build().check(model)
    roles = _empty_roles(recipe, model)
    return Group(
        _recipe_panel(recipe), _roles_table(roles), _cycle_text(recipe), _saved_text(recipe)
    )


def inspect_run(directory: Path) -> RenderableType:
    """A run: its recipe, and what became of its roles up to the latest checkpoint.

    No weights are read, and so none are checked.

    Raises:
        UserError: where there is no run, or it has no checkpoint.
    """
    check_run_directory(directory)
    recipe, checkpoint = load_recipe(directory / RECIPE), latest_checkpoint(directory)
    verify_state(checkpoint)
    counters, rates, about_roles = read_state(checkpoint)["counters"], {}, []
    if not isinstance(recipe.model, ModuleSettings):  # whose network is only known to Python
        roles = _empty_roles(recipe, recipe.model.build())
        load_counters(roles, counters)
        rates = {role.name: role.learning_rate for role in roles.values() if role.trainable}
        about_roles = [_roles_table(roles)]
    return Group(
        _recipe_panel(recipe),
        *about_roles,
        _cycle_text(recipe),
        _counters_table(counters, rates),
        _checkpoints_table(directory),
    )


def _empty_roles(recipe: Recipe, model: Model) -> Roles:
    """Roles without memory for their weights."""
    with torch.device("meta"):
        storage = build_storage(recipe, model, model.build_network(), recipe.roles)
        return build_roles(recipe, model, storage, recipe.roles, torch.device("meta"))


def inspect_checkpoint(checkpoint: Path) -> RenderableType:
    """A checkpoint: what it holds, every byte checked.

    Raises:
        UserError: naming what is damaged.
    """
    verify_checkpoint(checkpoint)
    state = read_state(checkpoint)
    recipe = checkpoint / RECIPE
    return Group(
        *([_yaml_panel(recipe.read_text())] if recipe.is_file() else []),
        _tensors_table(checkpoint / TENSORS, state["tensors"]),
        _counters_table(state.get("counters", {}), {}),
        _files_table(checkpoint),
        f"[bold]Cycle[/bold] {state['cycle']}: whole, every byte as the manifest says.",
    )


def _recipe_panel(recipe: Recipe) -> RenderableType:
    return _yaml_panel(dump_recipe(recipe))


def _yaml_panel(text: str) -> RenderableType:
    return Panel(Syntax(text, "yaml", background_color="default"), title="recipe")


def _roles_table(roles: Roles) -> Table:
    table = Table(title="Roles: parameters and memory (MiB)")
    table.add_column("role")
    table.add_column("weights in")
    for name in ("parameters", "weights", "gradients", "optimizer", "total"):
        table.add_column(name, justify="right")
    sums = [0.0] * 5
    for role in roles.values():
        weights = sum(p.numel() * p.element_size() for p in role.tensors) / MEBIBYTE
        # AdamW keeps two moments for each number.
        gradients, optimizer = (weights, 2 * weights) if role.trainable else (0.0, 0.0)
        row = [role.parameter_count, weights, gradients, optimizer, weights + gradients + optimizer]
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        where = f"adapter {role.adapter}" if role.adapter else f"{role.storage} network"
        table.add_row(role.name, where, f"{row[0]:,}", *(f"{x:.2f}" for x in row[1:]))
    table.add_section()
    table.add_row("all", "", f"{int(sums[0]):,}", *(f"{x:.2f}" for x in sums[1:]))
    return table


def _cycle_text(recipe: Recipe) -> str:
    method, first = recipe.method.build(), recipe.cycle.warmup_cycles + 1
    plan = plan_cycle(first, method.fake_updates_per_student, recipe.cycle, method.followers)
    phases = " -> ".join(p.name for p in plan)
    size, micro = recipe.train.batch_size, recipe.train.micro_batch_size
    portions = f", {micro} at a time" if micro else ""
    spared = " and ".join(role.replace("_", " ") for role in method.followers)
    warmup = f" The first {first - 1} cycles train the {spared} only." if first > 1 else ""
    return (
        f"[bold]Cycle[/bold] ({recipe.train.cycles} in all): {phases}; {size} samples a "
        f"phase{portions}; student batches: {recipe.cycle.fake_batches}.{warmup}"
    )


def _saved_text(recipe: Recipe) -> str:
    every, keep = recipe.checkpoint.every, recipe.checkpoint.keep
    return (
        f"[bold]Saved[/bold] in {recipe.run_dir}: every {every} cycles each network once, "
        f"optimizers, EMA, counters and data position; the newest {keep} and the best are kept."
    )


def _counters_table(counters: Mapping[str, Any], rates: Mapping[str, float]) -> Table:
    """Updates that were done; of the roles in `rates` also the learning rate of the next."""
    table = Table(title="Updates")
    columns = ("attempted", "successful", "skipped")
    for name in ("role", *columns, *(["learning rate"] if rates else [])):
        table.add_column(name, justify="left" if name == "role" else "right")
    for role, counts in counters.get("roles", {}).items():
        if counts["attempted"] or role in rates:
            rate = [f"{rates[role]:.3g}"] if role in rates else []
            table.add_row(role, *(str(counts[name]) for name in columns), *rate)
    if STUDENT_EMA in counters.get("roles", {}):
        table.add_row("student_ema", "", str(counters["ema_updates"]), "")
    return table


def _checkpoints_table(directory: Path) -> Table:
    table = Table(title="Checkpoints")
    for name in ("checkpoint", "MiB", "holds", "best"):
        table.add_column(name)
    best = read_best(directory)
    for path in complete_checkpoints(directory):
        files = read_manifest(path) or {}
        size = sum(entry["size"] for entry in files.values()) / MEBIBYTE
        cycle = checkpoint_cycle(path)
        mark = f"{best['metric']} {best['value']:.4g}" if best and best["cycle"] == cycle else ""
        held = [f"{s}/{name}" for s, names in read_state(path)["tensors"].items() for name in names]
        table.add_row(path.name, f"{size:.1f}", ", ".join(held), mark)
    return table


def _tensors_table(directory: Path, names: Mapping[str, list[str]]) -> Table:
    table = Table(title="Tensors")
    table.add_column("of")
    for name in ("tensors", "numbers", "dtype", "MiB", "files"):
        table.add_column(name, justify="right")
    parts = defaultdict(list)
    for path, tensor in saved_tensors(directory).items():
        parts[_owner(path)].append(tensor)
    files = _files_by_owner(directory)
    for owner in (f"{section}/{name}" for section, found in names.items() for name in found):
        tensors = parts[owner]
        size = sum(t.shape.numel() * t.dtype.itemsize for t in tensors) / MEBIBYTE
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
        numbers = sum(t.shape.numel() for t in tensors)
        cells = (str(len(tensors)), f"{numbers:,}", ", ".join(dtypes), f"{size:.2f}")
        table.add_row(owner, *cells, str(files[owner]))
    return table


def _files_by_owner(directory: Path) -> dict[str, int]:
    """In how many files each network and each optimizer lies."""
    found: dict[str, int] = defaultdict(int)
    for file in filter(Path.is_file, directory.rglob("*")):
        with safe_open(file, "pt") as content:
            for owner in set(map(_owner, content.keys())):
                found[owner] += 1
    return found


def _owner(path: str) -> str:
    """Of "networks/student/proj.weight" the part "networks/student"."""
    return "/".join(path.split("/", 2)[:2])


def _files_table(checkpoint: Path) -> Table:
    table = Table(title="Files")
    for name in ("file", "bytes", "SHA-256"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    files = read_manifest(checkpoint) or {}
    shards = defaultdict(list)
    for name, entry in files.items():
        if name.startswith(f"{TENSORS}/"):
            # Of several groups each has a folder of its own.
            shards[str(Path(name).parent)].append(entry["size"])
    for folder, sizes in shards.items():
        table.add_row(f"{folder}/ ({len(sizes)} shards)", f"{sum(sizes):,}", "")
    for name, entry in files.items():
        if not name.startswith(f"{TENSORS}/"):
            table.add_row(name, f"{entry['size']:,}", f"{entry['sha256'][:16]}...")
    return table
