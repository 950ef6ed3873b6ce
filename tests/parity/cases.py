"""One recipe in many dresses: what must not change its result."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fewstep
from fewstep.config import Recipe, parse_recipe
from fewstep.data.dataset import Dataset
from fewstep.run import Run

CYCLES = 10
OPTIMIZER = {"lr": 0.01, "betas": [0.5, 0.9], "clip_norm": 0.5}
COMMON: dict[str, Any] = {
    "seed": 3,
    "model": {
        "family": "dit",
        "network": {
            "sample_size": 4,
            "patch_size": 2,
            "num_layers": 2,
            "num_attention_heads": 1,
            "attention_head_dim": 8,
            "num_embeds_ada_norm": 3,
        },
    },
    "train": {"cycles": CYCLES, "batch_size": 6},
    "checkpoint": {"every": 1000},
    "logging": {"every": 1, "tensorboard": False},
    "ema": {"decay": 0.7, "start": 2},
    "runtime": {"dtype": "float64"},
}
METHODS: dict[str, dict[str, Any]] = {
    "dmd2": {
        "method": {"name": "dmd2", "steps": 2, "fake_updates_per_student": 2, "guidance": 2.0},
        "cycle": {"warmup_cycles": 1},
        "optimizers": {"student": OPTIMIZER, "fake_score": OPTIMIZER},
    },
    "flow_matching": {
        "method": {"name": "flow_matching", "sampling": {"steps": 2}},
        "data": {"name": "custom"},
        "optimizers": {"student": OPTIMIZER},
    },
}


def make_recipe(run_dir: Path, changes: Mapping[str, Any], method: str = "dmd2") -> Recipe:
    """The recipe with some dotted keys changed."""
    values = copy.deepcopy({**COMMON, **METHODS[method], "run_dir": str(run_dir)})
    if changes.get("storage") == "shared_base":
        values["lora"] = {"rank": 2}
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return parse_recipe(values)


def ten_images() -> Dataset:
    """Ten random images with labels, of the network's shape."""
    generator = torch.Generator().manual_seed(5)
    return Dataset(torch.randn(10, 1, 4, 4, generator=generator), torch.arange(10) % 3)


def train(
    run_dir: Path, changes: Mapping[str, Any], method: str = "dmd2", **options: Any
) -> dict[str, Tensor]:
    """Train, and give the losses of every phase and the final state, whole, as flat tensors."""
    losses: list[float] = []

    def on_cycle(cycle: int, results: Any) -> None:
        losses.extend(r.metrics["loss"] for r in results)

    data = ten_images() if method == "flow_matching" else None
    recipe = make_recipe(run_dir, changes, method)
    run = fewstep.train(recipe, data=data, on_cycle=on_cycle, **options)
    return {"losses": torch.tensor(losses, dtype=torch.float64), **whole_state(run)}


def whole_state(run: Run) -> dict[str, Tensor]:
    """Networks and optimizers of a run, every tensor whole."""
    state = run.worker.state_dict()
    return {
        f"{section}/{name}/{key}": tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for section in ("networks",)
        for name, tensors in state[section].items()
        for key, tensor in tensors.items()
    }


def largest_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest norm of a difference over the norm of the tensor, and whose it is."""
    assert left.keys() == right.keys()
    found = [(0.0, "")]
    for key, value in left.items():
        a, b = value.double(), right[key].double()
        assert a.shape == b.shape, key
        scale = max(float(a.norm()), 1e-12)
        found.append((float((a - b).norm()) / scale, key))
    return max(found)
