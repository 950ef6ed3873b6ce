"""From a role to samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fewstep.diffusion.draw import Draw
from fewstep.diffusion.prediction import Prediction
from fewstep.diffusion.samplers import sample_few_step, sample_heun
from fewstep.methods.method import Rollout, SamplerSpec, trained_transition
from fewstep.models.model import Denoiser, Model
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.roles.role import Roles


@final
@dataclass(frozen=True)
class Samples:
    """What a sampler made.

    Attributes:
        images: decoded samples [N, ...], on the CPU.
        labels: int64 [N], or None.
        seconds: time in the sampler, without set-up.
        network_calls: made for each batch, counted.
    """

    images: Tensor
    labels: Tensor | None
    seconds: float
    network_calls: int


def sample_role(
    roles: Roles,
    role: str,
    spec: SamplerSpec,
    count: int,
    *,
    labels: Tensor | None = None,
    seed: int = 0,
    batch_size: int = 256,
    on_batch: Callable[[int], None] = lambda done: None,
    ranks: Ranks = SINGLE,
) -> Samples:
    """Sample a role's network; sample i depends on seed, i and its label alone.

    Args:
        roles: holds the role.
        role: whose network.
        spec: grid, solver and guidance.
        count: number of samples.
        labels: int64 [count]; None for an unconditional network.
        seed: of the initial noise, which is the same for every role and solver.
        batch_size: samples at once.
        on_batch: called with the number of samples finished.
        ranks: that share the work; every one of them calls this, and gets all samples.

    Raises:
        ValueError: where labels do not fit the network.
    """
    check_labels(roles.model.classes, count, labels)
    mine = ranks.share(count)
    # As many calls on every rank, since a sharded network is gathered by all at once.
    rounds = range(0, -(-count // ranks.size), batch_size)
    ids = torch.arange(mine.start, max(mine.stop, mine.start + rounds.stop), device=roles.device)
    ids = ids.clamp(max=count - 1)
    condition = {} if labels is None else {"class_labels": labels.to(ids.device)[ids]}
    parts, calls, seconds = [], 0, 0.0
    with torch.no_grad(), roles.use(role) as denoiser:
        for start in rounds:
            rows = slice(start, start + batch_size)
            part = {key: value[rows] for key, value in condition.items()}
            began = time.perf_counter()
            samples, calls = sample_batch(denoiser, spec, ids[rows], part, seed, roles.dtype)
            parts.append(roles.model.decode(samples).float().cpu())
            seconds += time.perf_counter() - began
            on_batch(min(start + batch_size, count))
    images = ranks.gather_shares(torch.cat(parts)[: len(mine)], count)
    return Samples(images, labels, seconds, calls)


def sample_batch(
    denoiser: Denoiser,
    spec: SamplerSpec,
    ids: Tensor,
    condition: Mapping[str, Tensor],
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
    labels: Tensor | None,
    seed: int,
    dtype: torch.dtype,
) -> Rollout:
    """The samples of `sample_batch`, said so that any engine can make them, bit for bit.

    Args:
        model: the adapter.
        spec: few-step and without guidance, as a student's is.
        ids: int64 [B].
        labels: int64 [B], or None.
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
    condition = {} if labels is None else {"class_labels": labels.to(ids.device)}
    return Rollout(torch.stack(noise, 1), spec.sigmas, kind, condition)


def check_labels(classes: int | None, count: int, labels: Tensor | None) -> None:
    """Raise ValueError unless there is one valid label a sample, or none are needed."""
    if classes is None:
        if labels is not None:
            raise ValueError("the network is unconditional: it takes no class labels")
        return
    if labels is None or len(labels) != count:
        raise ValueError(f"{count} class labels are needed, one for each sample")
    if count and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise ValueError(f"class labels must be in 0..{classes - 1}")


def balanced_labels(classes: int | None, count: int) -> Tensor | None:
    """Labels 0, 1, ..., 0, 1, ...: int64 [count]; None for an unconditional network."""
    return None if classes is None else torch.arange(count) % classes


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many CPU threads in the block; None: as many as it does already."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
