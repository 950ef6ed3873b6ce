"""What tests of the adversarial head share: a recipe with one, and a phase by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fewstep.diffusion.draw import Draw
from fewstep.models.model import Condition, Model
from fewstep.training.loop import StopRequest
from fewstep.training.worker import Worker

OPTIMIZER = {"lr": 0.01, "betas": [0.5, 0.9], "clip_norm": 1.0}
ON: dict[str, Any] = {
    "method.adversarial": {"generator_weight": 0.5, "classifier_weight": 1.0},
    "optimizers.discriminator": OPTIMIZER,
    "data.name": "custom",
    "runtime.dtype": "float64",
    "method.guidance": 1.0,
}


def run_in_two_parts(train: Callable[..., Any]) -> tuple[Any, Any]:
    """A whole run, and one that was stopped after two cycles and gone on with.

    Args:
        train: called with the name of a run, and the arguments of `fewstep.train`.
    """
    stop = StopRequest()

    def on_cycle(cycle: int, results: Any) -> None:
        stop.requested = cycle == 2

    whole = train("whole")
    train("parts", stop=stop, on_cycle=on_cycle)
    return whole, train("parts", resume=True)


MakeWorker = Callable[..., Worker]


def phase_loss(worker: Worker, role: str, external: Mapping[str, Tensor] | None = None) -> Any:
    """The loss of one phase of a role, and its gradients, in the role's own place."""
    draw = Draw(3, 1, role)
    batch = worker.batches.batch(draw, 4)
    with worker.roles.use(role):
        loss = worker.method.phase_loss(role, worker.roles, batch, draw, draw, external or {})
        torch.autograd.backward(loss.loss)
    return loss


def gradients(worker: Worker, role: str) -> dict[str, Tensor]:
    return {
        k: p.grad.clone() for k, p in worker.roles[role].parameters.items() if p.grad is not None
    }


@contextmanager
def spying(model: Model) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inputs and levels of the network calls of a block of code."""
    calls: list[tuple[Tensor, Tensor]] = []
    forward = type(model).forward

    def spy(self: Model, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Any:
        calls.append((x.detach().clone(), sigma.clone()))
        return forward(self, network, x, sigma, condition)

    type(model).forward = spy  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        type(model).forward = forward  # type: ignore[method-assign]
