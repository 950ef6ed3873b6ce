"""The rollout engine that samples through a diffusers pipeline, and the choice of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import torch
from torch import Tensor, nn

from fewstep.config import Recipe
from fewstep.errors import TrainingError, UserError
from fewstep.methods.method import Rollout, SamplerSpec
from fewstep.models.model import Condition, Model
from fewstep.parallel.compute import compute_in
from fewstep.parallel.offload import Offload
from fewstep.roles.role import CPU, STUDENT
from fewstep.roles.storage import Independent
from fewstep.rollout import RolloutEngine, StudentEngine
from fewstep.training.worker import Worker
from fewstep.weights import Confirmation, bind, canonical_names, confirm


@final
class PipelineEngine:
    """A pipeline's network and scheduler, on noise that they are given.

    It computes in float32, and in another order than the trainer does: its samples are the
    trainer's but for rounding.
    """

    def __init__(self, directory: Path, device: torch.device = CPU) -> None:
        """Load a pipeline.

        Args:
            directory: an export, or another that `fewstep.pipeline.write_pipeline` has written.
            device: to sample on.
        """
        # It imports diffusers, which takes seconds; the other engine does without.
        from fewstep.pipeline import open_pipeline

        self.pipeline = open_pipeline(directory).to(device)
        network = self.pipeline.transformer
        storage = Independent({STUDENT: network})
        self._names = canonical_names(storage, STUDENT)
        self._tensors = {n: storage.tensors[STUDENT][key] for n, key in self._names.items()}
        self._offload = Offload(device, lambda: [*network.parameters(), *network.buffers()])

    @classmethod
    def from_network(
        cls, model: Model, network: nn.Module, spec: SamplerSpec, device: torch.device = CPU
    ) -> PipelineEngine:
        """The same by way of a temporary directory.

        Args:
            model: the adapter.
            network: a plain one, on any device.
            spec: how it is sampled.
            device: to sample on.

        Raises:
            UserError: where diffusers cannot sample such a network.
        """
        from fewstep.pipeline import check_model, write_pipeline

        check_model(model, spec, "rollout.engine: 'pipeline'")
        with TemporaryDirectory(prefix="fewstep_pipeline_") as directory:
            write_pipeline(model, network.to("cpu"), spec, Path(directory))
            return cls(Path(directory), device)

    @torch.no_grad()
    def generate(self, rollout: Rollout) -> Tensor:
        """See `RolloutEngine.generate`.

        Raises:
            TrainingError: also where the pipeline's scheduler makes another transition.
        """
        self._offload.require_awake("making samples")
        scheduler, network = self.pipeline.scheduler, self.pipeline.transformer
        own = "renoise" if scheduler.config.stochastic_sampling else "euler"
        if own != rollout.transition:
            raise TrainingError(
                f"rollout.engine: the pipeline's scheduler is for {own!r}, but samples by "
                f"{rollout.transition!r} are asked for"
            )
        noise = rollout.noise.to(network.device, network.dtype)
        condition = {key: value.to(network.device) for key, value in rollout.condition.items()}
        first, *others = rollout.sigmas
        if own == "euler":
            x0 = self._walk(noise[:, 0], rollout.sigmas, condition)
        else:
            # In a step to another sigma than zero the scheduler would draw noise of its own.
            x0 = self._walk(noise[:, 0], (first,), condition)
            for step, sigma in enumerate(others, start=1):
                scheduler.set_timesteps(sigmas=[sigma], device=noise.device)
                x = scheduler.scale_noise(x0, scheduler.timesteps, noise[:, step])
                x0 = self._walk(x, (sigma,), condition)
        return x0.to(rollout.noise.dtype)

    def _walk(self, x: Tensor, sigmas: Sequence[float], condition: Condition) -> Tensor:
        """From x [B, ...] at the first sigma by way of the others to zero: [B, ...]."""
        from fewstep.pipeline import call_network

        scheduler, network = self.pipeline.scheduler, self.pipeline.transformer
        # What is drawn for the step to zero is multiplied by it.
        unused = torch.Generator(x.device).manual_seed(0)
        scheduler.set_timesteps(sigmas=list(sigmas), device=x.device)
        for t in scheduler.timesteps:
            v = call_network(network, x, t, condition).to(x.dtype)
            x = scheduler.step(v, t, x, generator=unused).prev_sample
        return x

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine.load_weights`: those of a student with a network of its own."""
        self._offload.require_awake("taking weights")
        bind(self._tensors, weights)

    def bound(self, version: int) -> Confirmation:
        """See `RolloutEngine.bound`."""
        self._offload.require_awake("a checksum")
        return confirm(self.pipeline.transformer, self._names, version)

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        self._offload.sleep()

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        self._offload.wake()


def build_engine(recipe: Recipe, worker: Worker) -> RolloutEngine:
    """The engine that a recipe asks for, with the student's weights of this worker.

    Args:
        recipe: resolved.
        worker: holds the student, whole, as `build_worker` with roles=("student",) makes it; a
            pipeline does not need it afterwards.

    Raises:
        UserError: see `check_engine`.
    """
    check_engine(recipe, worker.roles.model)
    if recipe.rollout.engine == "student":
        return StudentEngine(worker.roles)
    roles = worker.roles
    plain = roles.storage.plain_network(STUDENT)
    engine = PipelineEngine.from_network(roles.model, plain, worker.method.sampler(), roles.device)
    dtype = recipe.runtime.torch_compute_dtype
    if dtype is not None:
        compute_in(engine.pipeline.transformer, dtype, roles.device.type)
    return engine


def check_engine(recipe: Recipe, model: Model) -> None:
    """Raise UserError unless the recipe's engine can sample its student; nothing is loaded."""
    if recipe.rollout.engine == "student":
        return
    from fewstep.pipeline import check_model

    if recipe.storage != "independent":
        raise UserError(
            f"rollout.engine: 'pipeline' needs storage 'independent': a pipeline's network has no "
            f"adapters to send weights to; storage is {recipe.storage!r}, so use 'student'"
        )
    if recipe.runtime.dtype != "float32":
        raise UserError(
            f"rollout.engine: 'pipeline' computes in float32, as diffusers' scheduler does; "
            f"runtime.dtype is {recipe.runtime.dtype!r}, so use 'student'"
        )
    check_model(model, recipe.method.build().sampler(), "rollout.engine: 'pipeline'")
