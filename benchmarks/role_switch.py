"""What it costs to put another role in force, beside the cheapest forward pass."""

import statistics
import time

import torch
from rich.table import Table

from benchmarks.setup import digits_worker


def run() -> Table:
    """The table; the goal is below 1% of the cheapest forward (one sample)."""
    table = Table(title="Role switch (goal: below 1% of the cheapest forward, one sample)")
    for name in ("storage", "switch, us", "forward, us", "share"):
        table.add_column(name, justify="left" if name == "storage" else "right")
    for storage in ("independent", "shared_base"):
        roles = digits_worker(storage).roles
        x, sigma, condition = no_grad_inputs_of_one(roles)
        switches, forwards = [], []
        for _ in range(200):
            began = time.perf_counter()
            for name in ("student", "fake_score", "teacher_score", "student"):
                with roles.use(name):
                    pass
            switches.append((time.perf_counter() - began) / 8)  # each use switches there and back
            with torch.no_grad(), roles.use("teacher_score") as teacher:
                began = time.perf_counter()
                teacher(x, sigma, condition)
                forwards.append(time.perf_counter() - began)
        switch, forward = statistics.median(switches), statistics.median(forwards)
        table.add_row(
            storage, f"{1e6 * switch:.1f}", f"{1e6 * forward:.0f}", f"{switch / forward:.2%}"
        )
    return table


def no_grad_inputs_of_one(
    roles: object,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Inputs of a single sample."""
    shape = (1, *roles.model.sample_shape)
    return torch.randn(shape), torch.rand(1), {"class_labels": torch.zeros(1, dtype=torch.int64)}
