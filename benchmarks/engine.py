"""Time per cycle: our engine against a plain loop that makes the same network calls."""

import copy
from collections.abc import Callable

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from rich.table import Table
from torch import Tensor, nn

from benchmarks.setup import NETWORKS, STORAGES, alternate, digits_worker
from fewstep.diffusion.draw import Draw
from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import run_cycle
from fewstep.training.worker import Worker

CYCLES_A_ROUND = 4
ROUNDS = 12


class PlainLoop:
    """DMD2 as one would write it by hand: networks, optimizers, and nothing around them.

    `use(role)` gives the network of a role; for shared storage it sets the adapters' flags, which
    is the least that can be done.
    """

    def __init__(
        self,
        worker: Worker,
        copied: Callable[[dict[str, nn.Module]], dict[str, nn.Module]] = copy.deepcopy,
        batch: int | None = None,
    ) -> None:
        """Copies of a worker's networks, with the same optimizers and settings.

        Args:
            worker: holds the networks, whole.
            copied: copies of them, spread over ranks or not.
            batch: samples of a phase here; by default the worker's.
        """
        self.worker, self.method = worker, worker.method
        settings = worker.method.settings
        self.sigmas, self.k, self.w = (
            settings.grid,
            settings.fake_updates_per_student,
            settings.guidance,
        )
        self.batch = batch or worker.settings.batch_size
        self.null = worker.roles.model.classes
        networks = copied(worker.roles.storage.networks)
        self.use = shared_switch(networks["base"]) if "base" in networks else networks.__getitem__
        own = self.parameters(networks)
        self.trained = {name: own[name] for name in ("student", "fake_score")}
        self.ema = own.get("student_ema")
        self.optimizers = {
            name: worker.roles[name].settings.build(parameters)
            for name, parameters in self.trained.items()
        }

    def parameters(self, networks: dict[str, nn.Module]) -> dict[str, list[nn.Parameter]]:
        """Each role's tensors."""
        found = {}
        for name, role in self.worker.roles.items():
            network = networks["base"] if "base" in networks else networks[name]
            by_name = dict(network.named_parameters())
            found[name] = [by_name[key] for key in role.parameters]
        return found

    def velocity(self, role: str, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """One network call."""
        return self.use(role)(x, sigma * 1000, labels, return_dict=False)[0]

    def step(self, role: str, loss: Tensor) -> None:
        """Backward, clip and update."""
        loss.backward()
        clip = self.worker.roles[role].settings.clip_norm
        nn.utils.clip_grad_norm_(self.trained[role], clip or float("inf"), foreach=True)
        self.optimizers[role].step()
        self.optimizers[role].zero_grad()

    @torch.no_grad()
    def rollout(self, exit_step: int, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The student's steps before the exit."""
        x = torch.randn(self.batch, *self.worker.roles.model.sample_shape)
        for step in range(exit_step):
            sigma = torch.full((self.batch,), self.sigmas[step])
            x0 = x - self.sigmas[step] * self.velocity("student", x, sigma, labels)
            following = self.sigmas[step + 1]
            x = (1 - following) * x0 + following * torch.randn_like(x)
        return x, torch.full((self.batch,), self.sigmas[exit_step])

    def generate(self, exit_step: int, labels: Tensor) -> Tensor:
        """Student samples with a graph where gradients are on."""
        x, sigma = self.rollout(exit_step, labels)
        return x - sigma[:, None, None, None] * self.velocity("student", x, sigma, labels)

    @torch.no_grad()
    def direction(self, x0: Tensor, labels: Tensor) -> Tensor:
        """The difference of the scores, normalised."""
        sigma = torch.rand(self.batch).clamp(0.02, 0.98)
        s = sigma[:, None, None, None]
        x = (1 - s) * x0 + s * torch.randn_like(x0)
        fake = x - s * self.velocity("fake_score", x, sigma, labels)
        v = self.velocity("teacher_score", x, sigma, labels)
        if self.w != 1:
            u = self.velocity("teacher_score", x, sigma, torch.full_like(labels, self.null))
            v = u + self.w * (v - u)
        real = x - s * v
        return (fake - real) / (x0 - real).abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-8)

    def run_cycle(self, cycle: int) -> None:
        """One student update and K of the fake score, leaving at the engine's exit steps."""
        seed = self.worker.seed
        labels = torch.randint(0, self.null, (self.batch,))
        exit_step = Draw(seed, cycle, "student").choice("exit", len(self.sigmas))
        x0 = self.generate(exit_step, labels)
        target = (x0 - self.direction(x0.detach(), labels)).detach()
        self.use("student")
        self.step("student", 0.5 * ((x0 - target) ** 2).mean())
        if self.ema is not None:
            torch._foreach_lerp_(self.ema, self.trained["student"], 1 - self.worker.roles.ema.decay)
        for k in range(self.k):
            labels = torch.randint(0, self.null, (self.batch,))
            exit_step = Draw(seed, cycle, f"fake_score/{k}").choice("exit", len(self.sigmas))
            with torch.no_grad():
                x0 = self.generate(exit_step, labels)
            sigma, eps = torch.rand(self.batch), torch.randn_like(x0)
            s = sigma[:, None, None, None]
            v = self.velocity("fake_score", (1 - s) * x0 + s * eps, sigma, labels)
            self.step("fake_score", ((v - (eps - x0)) ** 2).mean())


def shared_switch(base: nn.Module) -> Callable[[str], nn.Module]:
    """Set the adapters' flags for a role and return the base."""
    layers = [m for m in base.modules() if isinstance(m, BaseTunerLayer)]

    def use(role: str) -> nn.Module:
        for layer in layers:
            layer.__dict__["_disable_adapters"] = role == "teacher_score"
            layer.__dict__["_active_adapter"] = [role]
        return base

    return use


def compare(storage: str, network: str) -> tuple[float, float, float]:
    """Median seconds per cycle of engine and plain loop, and the median ratio."""
    worker = digits_worker(storage, network)
    plain = PlainLoop(worker)
    counters = [0, 0]
    k, cycle_settings = worker.method.fake_updates_per_student, CycleSettings()

    def ours() -> None:
        for _ in range(CYCLES_A_ROUND):
            counters[0] += 1
            run_cycle(worker, counters[0], k, cycle_settings)

    def theirs() -> None:
        for _ in range(CYCLES_A_ROUND):
            counters[1] += 1
            plain.run_cycle(counters[1])

    a, b, ratio = alternate(ours, theirs, ROUNDS)
    return a / CYCLES_A_ROUND, b / CYCLES_A_ROUND, ratio


def run() -> Table:
    """The table; the goal is a ratio of at most 1.05."""
    table = Table(title="Engine against a plain loop with the same network calls (goal <= 1.05)")
    for name in ("network", "storage", "engine, ms a cycle", "plain loop, ms a cycle", "ratio"):
        table.add_column(name, justify="left" if name in ("network", "storage") else "right")
    for network in NETWORKS:
        for storage in STORAGES:
            ours, theirs, ratio = compare(storage, network)
            row = (f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{ratio:.3f}")
            table.add_row(network, storage, *row)
    return table
