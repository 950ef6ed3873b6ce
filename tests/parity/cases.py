"""One recipe in many dresses: what must not change its result, on 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import fewstep
from fewstep.config import Recipe, parse_recipe
from fewstep.data.dataset import Dataset
from fewstep.methods import flow_matching
from fewstep.methods.dmd2 import DMD2
from fewstep.methods.flow_matching import FlowMatching
from fewstep.models.module import ModuleModel
from fewstep.parallel.ranks import Ranks
from fewstep.run import Run
from fewstep.training.loop import StopRequest

CYCLES = 5
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
    "logging": {"every": 1, "teacher_samples": 2, "tensorboard": False},
    "ema": {"decay": 0.7, "start": 2},
    "runtime": {"dtype": "float64"},
}
METHODS: dict[str, dict[str, Any]] = {
    "dmd2": {
        "method": {"name": "dmd2", "steps": 2, "fake_updates_per_student": 1, "guidance": 2.0},
        "cycle": {"warmup_cycles": 1},
        "optimizers": {"student": OPTIMIZER, "fake_score": OPTIMIZER},
    },
    "adversarial": {
        "method": {
            "name": "dmd2",
            "steps": 2,
            "fake_updates_per_student": 1,
            "adversarial": {
                "generator_weight": 0.5,
                "classifier_weight": 1.0,
                "r1": {"weight": 1.0, "std": 0.1},
            },
        },
        "data": {"name": "custom"},
        "cycle": {"warmup_cycles": 1},
        "optimizers": dict.fromkeys(("student", "fake_score", "discriminator"), OPTIMIZER),
    },
    "flow_matching": {
        "method": {"name": "flow_matching", "sampling": {"steps": 2}},
        "data": {"name": "custom"},
        "optimizers": {"student": OPTIMIZER},
    },
}


class Odd(nn.Module):
    """What networks of one's own may hold: tied and unused weights, buffers, single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.enter, self.leave, self.tied = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 5)
        self.tied.weight = self.blocks[0].weight
        self.dead = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.full((5,), 0.1))
        self.register_buffer("order", torch.arange(5).flip(0), persistent=False)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        h = self.enter(torch.cat([x, sigma[:, None].to(x.dtype)], dim=1))
        for block in self.blocks:
            h = h + torch.tanh(block(h) + self.offset)
        return self.leave(self.gain * self.tied(h)[:, self.order])


@dataclass(frozen=True)
class Case:
    """A run, or several on one directory.

    Attributes:
        name: of the case, and of its run directory.
        changes: dotted keys of the recipe.
        method: one of `METHODS`.
        stop_after: end the run after this cycle.
        resume: "" starts anew; "here" goes on with what is in the run directory; any other text
            is a run directory, of another launch perhaps, that is copied first.
        tamper: what is done to the losses of some phases (see `tampering`).
        odd: take the network `Odd` instead of the recipe's.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    method: str = "dmd2"
    stop_after: int = 0
    resume: str = ""
    tamper: Mapping[str, Any] = field(default_factory=dict)
    odd: bool = False


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


def ten_points() -> Dataset:
    """Ten random points, for `Odd`."""
    return Dataset(torch.randn(10, 2, generator=torch.Generator().manual_seed(6)), None)


class _Spoil(torch.autograd.Function):
    """The identity, but for its gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float) -> Tensor:
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.value, None


@contextmanager
def tampering(how: Mapping[str, Any]) -> Iterator[None]:
    """Change the losses that methods give.

    Args:
        how: {"in": "loss" or "gradient", "value": "nan" or "inf", "role", "cycles", "sample"}
            spoils the micro-batches of those phases that hold that sample; {"in": "normalizer"}
            weighs every sample by a number of its own, through the normalizer.
    """
    if not how:
        yield
        return
    kinds, errors = (DMD2, FlowMatching), []
    originals = [kind.phase_loss for kind in kinds]
    denoising_loss = flow_matching.denoising_loss

    def remember(*args: Any) -> Tensor:
        errors.append(denoising_loss(*args))
        return errors[-1]

    def make(original: Any) -> Any:
        def phase_loss(self: Any, role: str, roles: Any, batch: Any, draw: Any, *rest: Any) -> Any:
            result = original(self, role, roles, batch, draw, *rest)
            if how["in"] == "normalizer":
                weights = 1.0 + batch.sample_ids % 3
                loss = (weights * errors.pop()).sum() / weights.sum()
                return replace(result, loss=loss, normalizer=weights.sum())
            here = role == how["role"] and draw.cycle in how["cycles"]
            if not here or how["sample"] not in batch.sample_ids.tolist():
                return result
            value = float(how["value"])
            spoiled = (
                result.loss * value if how["in"] == "loss" else _Spoil.apply(result.loss, value)
            )
            return replace(result, loss=spoiled)

        return phase_loss

    for kind, original in zip(kinds, originals, strict=True):
        kind.phase_loss = make(original)  # type: ignore[method-assign]
    flow_matching.denoising_loss = remember
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.phase_loss = original  # type: ignore[method-assign]
        flow_matching.denoising_loss = denoising_loss


def train(case: Case, directory: Path) -> dict[str, Tensor]:
    """The losses of every phase, samples, and the final state, whole, as flat tensors."""
    losses: list[float] = []
    stop = StopRequest()

    def on_cycle(cycle: int, results: Any) -> None:
        losses.extend(r.metrics["loss"] for r in results)
        stop.requested = cycle == case.stop_after

    needed = case.method != "dmd2" or "validation" in case.changes
    data = (ten_points() if case.odd else ten_images()) if needed else None
    recipe = make_recipe(directory / case.name, case.changes, case.method)
    resume = bool(case.resume)
    model = ModuleModel(Odd, (2,)) if case.odd else None
    with tampering(case.tamper):
        run = fewstep.train(
            recipe, model=model, data=data, on_cycle=on_cycle, resume=resume, stop=stop
        )
    counters = run.worker.state_dict()["counters"]
    numbers = [n for role in counters["roles"].values() for n in role.values()]
    return {
        "counters": torch.tensor([*numbers, counters["ema_updates"]]),
        "losses": torch.tensor(losses, dtype=torch.float64),
        "samples": run.sample(7).images,
        **whole_state(run),
    }


def whole_state(run: Run) -> dict[str, Tensor]:
    """Networks and optimizers of a run, every tensor whole."""
    state = run.worker.state_dict()
    return {
        f"{section}/{name}/{key}": (
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        )
        for section in ("networks", "optimizers")
        for name, tensors in state[section].items()
        for key, tensor in tensors.items()
    }


def largest_difference(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], prefix: str = ""
) -> tuple[float, str]:
    """The largest norm of a difference over the norm of the tensor, and whose it is."""
    assert left.keys() == right.keys()
    found = [(0.0, "")]
    for key, value in left.items():
        if key.startswith(prefix):
            a, b = value.detach().double(), right[key].detach().double()
            assert a.shape == b.shape, key
            found.append((float((a - b).norm()) / max(float(a.norm()), 1e-12), key))
    return max(found)


def rest_of(whole: dict[str, Tensor], resumed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a whole run gave, its losses from where one was gone on with."""
    return {**whole, "losses": whole["losses"][-len(resumed["losses"]) :]}


def run_cases(ranks: Ranks, cases: Sequence[Case], out: Path) -> None:
    """Be one rank: run every case, rank 0 writes what came out."""
    logging.getLogger("fewstep").setLevel(logging.ERROR)
    for case in cases:
        if ranks.first and case.resume not in ("", "here"):
            shutil.copytree(case.resume, out / case.name)
        dist.barrier()
        result = train(case, out)
        if ranks.first:
            save_file({k: v.contiguous() for k, v in result.items()}, out / f"{case.name}.result")
        dist.barrier()
