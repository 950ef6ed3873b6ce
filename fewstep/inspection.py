"""What `fewstep inspect` shows of a recipe or a run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from fewstep.checkpoint import complete_checkpoints, read_best, read_manifest
from fewstep.config import Recipe, dump_recipe
from fewstep.roles.role import Roles
from fewstep.run import build_roles, build_storage, open_run, resolve_recipe
from fewstep.training.cycle import plan_cycle

MEBIBYTE = 2**20


def inspect_recipe(recipe: Recipe) -> RenderableType:
    """A recipe before it is run; networks are built without memory for their weights."""
    recipe = resolve_recipe(recipe)
    model = recipe.model.build()
    method = recipe.method.build()
    method.check(model)
    with torch.device("meta"):
        storage = build_storage(recipe, model, model.build_network())
        roles = build_roles(recipe, model, storage, torch.device("meta"))
    return Group(
        _recipe_panel(recipe), _roles_table(roles), _cycle_text(recipe), _saved_text(recipe)
    )


def inspect_run(directory: Path) -> RenderableType:
    """A run: its recipe, and what became of its roles up to the latest checkpoint."""
    run = open_run(directory)
    return Group(
        _recipe_panel(run.recipe),
        _roles_table(run.roles),
        _cycle_text(run.recipe),
        _counters_table(run.roles),
        _checkpoints_table(directory),
    )


def _recipe_panel(recipe: Recipe) -> RenderableType:
    return Panel(Syntax(dump_recipe(recipe), "yaml", background_color="default"), title="recipe")


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
    k = recipe.method.build().fake_updates_per_student
    first = recipe.cycle.warmup_cycles + 1
    phases = " -> ".join(p.name for p in plan_cycle(first, k, recipe.cycle))
    size, micro = recipe.train.batch_size, recipe.train.micro_batch_size
    portions = f", {micro} at a time" if micro else ""
    warmup = f" The first {first - 1} cycles train the fake score only." if first > 1 else ""
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


def _counters_table(roles: Roles) -> Table:
    table = Table(title="Updates")
    for name in ("role", "attempted", "successful", "skipped", "learning rate"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for role in roles.values():
        if role.trainable:
            counts = (role.attempted, role.successful, role.skipped)
            table.add_row(role.name, *map(str, counts), f"{role.learning_rate:.3g}")
    if roles.ema is not None:
        table.add_row("student_ema", "", str(roles.ema_updates), "", "")
    return table


def _checkpoints_table(directory: Path) -> Table:
    table = Table(title="Checkpoints")
    for name in ("checkpoint", "MiB", "holds", "best"):
        table.add_column(name)
    best = read_best(directory)
    for path in complete_checkpoints(directory):
        files = read_manifest(path) or {}
        size = sum(entry["size"] for entry in files.values()) / MEBIBYTE
        cycle = json.loads((path / "state.json").read_text())["cycle"]
        mark = f"{best['metric']} {best['value']:.4g}" if best and best["cycle"] == cycle else ""
        tensors = (f.removesuffix(".safetensors") for f in files if f.endswith(".safetensors"))
        table.add_row(path.name, f"{size:.1f}", ", ".join(tensors), mark)
    return table
