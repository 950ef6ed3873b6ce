"""A model that fails in one process of a run, once it is told to; and `fewstep` with that model.

Every process that calls the network writes its number into `FOLDER/pids/NAME`, where NAME is that
of its actor, as in "trainer-1". A file `FOLDER/faults/NAME` tells it what to do at its next call:
"raise", "kill", "stop", "spin" or "nan", once; "kill again": at every call, of its successors too.
When it does so is written into `FOLDER/done/NAME`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor, nn

from fewstep.config import Recipe
from fewstep.launch.hooks import OnCycle
from fewstep.models.mixture import MixtureSettings
from fewstep.models.model import Condition, Model
from fewstep.run import Trained

WIDTH, DEPTH = 8, 1
FOLDERS = ("pids", "faults", "done")


def spin() -> None:
    """Hang in Python code, deaf to errors."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


class Idle:
    """A process that does nothing."""


class Faulty(Model):
    """The mixture, with a fault."""

    def __init__(self, folder: Path) -> None:
        self.inner = MixtureSettings(width=WIDTH, depth=DEPTH).build()
        self.folder = folder
        for name in FOLDERS:
            (folder / name).mkdir(exist_ok=True, parents=True)
        self.path, self.prediction = self.inner.path, self.inner.prediction
        self.sample_shape = self.inner.sample_shape

    def build_network(self) -> nn.Module:
        return self.inner.build_network()

    def student_network(self, teacher: nn.Module) -> nn.Module:
        return self.inner.student_network(teacher)

    def load_network(self, directory: Path) -> nn.Module:
        return self.inner.load_network(directory)

    def save_network(self, network: nn.Module, directory: Path) -> None:
        self.inner.save_network(network, directory)

    def forward(self, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        name = ray.get_runtime_context().get_actor_name().replace("/", "-")
        pid, fault = self.folder / "pids" / name, self.folder / "faults" / name
        pid.write_text(str(os.getpid()))
        output = self.inner.forward(network, x, sigma, condition)
        return self.fail(fault, output) if fault.exists() else output

    def fail(self, fault: Path, output: Tensor) -> Tensor:
        kind, _, again = fault.read_text().partition(" ")
        if not again:
            fault.unlink()
        (self.folder / "done" / fault.name).write_text(str(time.time()))
        if kind == "raise":
            raise ValueError("this rank is broken")
        if kind == "spin":
            spin()
        if kind == "nan":
            return output * torch.nan
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        raise AssertionError(kind)

    def arm(self, name: str, kind: str) -> None:
        """Let a process do something at its next call."""
        draft = self.folder / "draft"
        draft.write_text(kind)
        draft.replace(self.folder / "faults" / name.replace("/", "-"))

    def arm_after(self, cycle: int, name: str, kind: str) -> OnCycle:
        """`arm`, as something to call after each cycle."""

        def on_cycle(done: int, results: Any) -> None:
            if done == cycle:
                self.arm(name, kind)

        return on_cycle

    def pid(self, name: str) -> int:
        """The number of a process."""
        return int((self.folder / "pids" / name.replace("/", "-")).read_text())

    def seconds(self, name: str) -> float:
        """Since when a process has failed."""
        done = (self.folder / "done" / name.replace("/", "-")).read_text()
        return time.time() - float(done)


def main() -> None:
    """The command `fewstep`, whose runs take the model.

    The environment variable FAULTY is its folder; ARM is empty, or "CYCLE NAME KIND": which fault
    there is after which cycle.
    """
    import faulty

    from fewstep import cli
    from fewstep.launch import command
    from fewstep.launch.ray.driver import train_on_ray

    ray.cloudpickle.register_pickle_by_value(faulty)
    model = faulty.Faulty(Path(os.environ["FAULTY"]))
    after, name, kind = (os.environ["ARM"] or "0 - -").split()
    arm = model.arm_after(int(after), name, kind)

    def driver(recipe: Recipe, on_cycle: OnCycle, **rest: Any) -> Trained:
        def then(cycle: int, results: Any) -> None:
            on_cycle(cycle, results)
            arm(cycle, results)

        return train_on_ray(recipe, model=model, on_cycle=then, **rest)

    command.ray_driver = lambda: driver  # type: ignore[attr-defined]
    sys.argv[0] = "fewstep"
    cli.main()


if __name__ == "__main__":
    main()
