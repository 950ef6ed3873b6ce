"""From a role to samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fewstep.data.conditions import Conditions
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.prediction import Prediction
from fewstep.diffusion.samplers import sample_few_step, sample_heun
from fewstep.methods.method import Rollout, SamplerSpec, trained_transition
from fewstep.models.model import Condition, Denoiser, Model
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.roles.role import Roles

# Of samples that one network call is given: a few hundred small ones, or 4 latents of 1024 pixels.
MOST_AT_ONCE, NUMBERS_AT_ONCE = 256, 2**20


@final
@dataclass(frozen=True)
class Samples:
    """What a sampler made.

    Attributes:
        images: decoded samples [N, ...], on the CPU.
        conditions: what they were conditioned on.
        seconds: time in the sampler, without set-up.
        network_calls: made for each batch, counted.
    """

    images: Tensor
    conditions: Conditions
    seconds: float
    network_calls: int

    @property
    def labels(self) -> Tensor | None:
        """Class labels, int64 [N], or None."""
        return self.conditions.labels


def sample_role(
    roles: Roles,
    role: str,
    spec: SamplerSpec,
    conditions: Conditions,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
    ranks: Ranks = SINGLE,
    decode: bool = True,
) -> Samples:
    """Sample a role's network; sample i depends on seed, i and its condition alone.

    Args:
        roles: holds the role.
        role: whose network.
        spec: grid, solver and guidance.
        conditions: of each sample.
        seed: of the initial noise, which is the same for every role and solver.
        batch_size: samples at once; None: `samples_at_once`.
        on_batch: called with the number of samples finished.
        ranks: that share the work; every one of them calls this, and gets all samples.
        decode: whether samples are made into images, or stay as the network has them.

    Raises:
        ValueError: where the conditions do not fit the network.
    """
    check_conditions(roles.model, conditions)
    count, at_once = len(conditions), batch_size or samples_at_once(roles.model)
    mine = ranks.share(count)
    # As many calls on every rank, since a sharded network is gathered by all at once.
    rounds = range(0, -(-count // ranks.size), at_once)
    ids = torch.arange(mine.start, max(mine.stop, mine.start + rounds.stop), device=roles.device)
    ids = ids.clamp(max=count - 1)
    parts, calls, seconds = [], 0, 0.0
    with torch.no_grad(), roles.use(role) as denoiser:
        for start in rounds:
            some = ids[start : start + at_once]
            condition = placed(conditions.of(some.cpu()), roles.device, roles.dtype)
            began = time.perf_counter()
            samples, calls = sample_batch(denoiser, spec, some, condition, seed, roles.dtype)
            images = roles.model.decode(samples) if decode else samples
            parts.append(images.float().cpu())
            seconds += time.perf_counter() - began
            on_batch(min(start + at_once, count))
    gathered = ranks.gather_shares(torch.cat(parts)[: len(mine)], count)
    return Samples(gathered, conditions, seconds, calls)


def samples_at_once(model: Model) -> int:
    """How many samples of a network's size are made together, where nobody says."""
    return max(1, min(MOST_AT_ONCE, NUMBERS_AT_ONCE // math.prod(model.sample_shape)))


def placed(condition: Condition, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """A condition on a device; entries that are floating point in `dtype`."""
    return {
        key: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for key, value in condition.items()
    }


def sample_batch(
    denoiser: Denoiser,
    spec: SamplerSpec,
    ids: Tensor,
    condition: Condition,
    seed: int,
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    """Samples [B, ...] of one batch with the noise of their ids, and the network calls made."""
    draw, shape = Draw(seed, 0, "sample"), denoiser.model.sample_shape
    calls = 0

    def predict(x: Tensor, sigma: Tensor) -> Prediction:
        nonlocal calls
        calls += 1 if spec.guidance == 1 else 2
        return denoiser.guided(x, sigma, condition, spec.guidance)

    def fresh_noise(step: int) -> Tensor:
        return draw.normal(f"noise/{step}", ids, shape, dtype)

    x = denoiser.model.path.prior(fresh_noise(0))
    if spec.solver == "heun":
        return sample_heun(predict, x, spec.sigmas), calls
    kind = trained_transition(spec.solver)
    return sample_few_step(predict, x, spec.sigmas, kind, fresh_noise), calls


def rollout_of_samples(
    model: Model,
    spec: SamplerSpec,
    ids: Tensor,
    condition: Condition,
    seed: int,
    dtype: torch.dtype,
) -> Rollout:
    """The samples of `sample_batch`, said so that any engine can make them, bit for bit.

    Args:
        model: the adapter.
        spec: few-step and without guidance, as a student's is.
        ids: int64 [B].
        condition: of these samples, each entry [B, ...].
        seed: of the noise.
        dtype: of the noise.

    Raises:
        ValueError: for another kind of sampler.
    """
    kind = trained_transition(spec.solver)
    if spec.guidance != 1:
        raise ValueError("a guided sampler calls the network twice a step")
    draw, used = Draw(seed, 0, "sample"), spec.steps if kind == "renoise" else 1
    noise = [draw.normal(f"noise/{s}", ids, model.sample_shape, dtype) for s in range(used)]
    return Rollout(torch.stack(noise, 1), spec.sigmas, kind, placed(condition, ids.device, dtype))


def check_conditions(model: Model, conditions: Conditions) -> None:
    """Raise ValueError unless samples have labels or prompts just where the network takes any."""
    labels, classes = conditions.labels, model.classes
    if (conditions.prompts is not None) != model.prompted:
        given = "needs a prompt for each sample" if model.prompted else "takes no prompts"
        raise ValueError(f"the network {given}")
    if classes is None:
        if labels is not None:
            raise ValueError("the network is unconditional: it takes no class labels")
        return
    if labels is None:
        raise ValueError(f"{len(conditions)} class labels are needed, one for each sample")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise ValueError(f"class labels must be in 0..{classes - 1}")


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many CPU threads in the block; None: as many as it does already."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
