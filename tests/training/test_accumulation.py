"""A phase of eight samples gives one update, however they are split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewstep.data.batches import DataBatches
from fewstep.data.dataset import Dataset
from fewstep.diffusion.draw import Draw
from fewstep.errors import TrainingError
from fewstep.methods.flow_matching import FlowMatching, FlowMatchingSettings
from fewstep.methods.method import PhaseLoss
from fewstep.roles.optimizer import OptimizerSettings, ScheduleSettings
from fewstep.training.phase import PhaseRequest
from fewstep.training.worker import Worker

SPLITS = [1, 4, 2, 5, 7, 100]


def run(worker: Worker, role: str) -> tuple[list[Tensor], dict[str, float]]:
    before = [p.detach().clone() for p in worker.roles[role].tensors]
    result = worker.run_phase(PhaseRequest(1, role, role, rollout=role))
    assert result.updated
    after = worker.roles[role].tensors
    changes = [p.detach() - b for p, b in zip(after, before, strict=True)]
    assert any(change.abs().max() > 1e-6 for change in changes)
    return changes, dict(result.metrics)


def assert_same(left, right) -> None:
    for a, b in zip(left[0], right[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert left[1].keys() == right[1].keys()
    for key, value in left[1].items():
        assert value == pytest.approx(right[1][key], rel=1e-12, abs=1e-12), key


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("role", ["student", "fake_score"])
def test_dmd2(build_worker, dmd2, storage, role, clip) -> None:
    optimizer = OptimizerSettings(lr=0.1, betas=(0.5, 0.9), eps=1e-2, clip_norm=clip)
    whole, *others = [
        run(build_worker(dmd2(), storage, micro_batch_size=size, optimizer=optimizer), role)
        for size in (None, *SPLITS)
    ]
    assert whole[1]["grad_norm"] > 1e-3
    for other in others:
        assert_same(other, whole)


def test_flow_matching(build_worker) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(11, 2, generator=generator, dtype=torch.float64)
    batches = DataBatches(Dataset(samples), torch.device("cpu"), torch.float64)
    whole, *others = [
        run(
            build_worker(
                FlowMatching(FlowMatchingSettings()), micro_batch_size=size, batches=batches
            ),
            "student",
        )
        for size in (None, *SPLITS)
    ]
    for other in others:
        assert_same(other, whole)


def sample_losses(role, roles, batch, draw) -> Tensor:
    """A loss of each sample, [B]."""
    x = draw.normal("x", batch.sample_ids, (2,), roles.dtype)
    sigma = draw.uniform("sigma", batch.sample_ids, roles.dtype)
    with roles.use(role) as denoiser:
        return ((denoiser(x, sigma, {}).output - 1) ** 2).sum(1)


def weighted_loss(role, roles, batch, draw) -> PhaseLoss:
    """Samples count differently: a mean over units, of which each sample has its own number."""
    losses = sample_losses(role, roles, batch, draw)
    units = (1 + 3 * batch.sample_ids).to(losses.dtype)
    mean = (units * losses).sum() / units.sum()
    return PhaseLoss(mean, {"again": mean.detach()}, normalizer=units.sum())


@pytest.mark.parametrize("as_number", [False, True])
def test_normalizers_weigh_micro_batches(build_worker, scripted, storage, as_number) -> None:
    def script(*args) -> PhaseLoss:
        loss = weighted_loss(*args)
        number = float(loss.normalizer) if as_number else loss.normalizer
        return PhaseLoss(loss.loss, loss.metrics, normalizer=number)

    whole, *others = [
        run(build_worker(scripted(script), storage, micro_batch_size=size), "student")
        for size in (None, *SPLITS)
    ]
    for other in others:
        assert_same(other, whole)
        assert other[1]["again"] == pytest.approx(other[1]["loss"])


def test_normalizer_is_the_written_formula(build_worker, scripted) -> None:
    """gradient = sum of n * grad / sum of n, before clipping."""
    numbers = [3.0, 0.5]

    def script(role, roles, batch, draw) -> PhaseLoss:
        number = numbers[int(batch.sample_ids[0]) // 5]
        return PhaseLoss(sample_losses(role, roles, batch, draw).mean(), normalizer=number)

    # With eps this large AdamW's first step is lr * gradient / eps.
    settings = OptimizerSettings(lr=1e4, betas=(0.0, 0.0), eps=1e4, clip_norm=1e-2)
    worker = build_worker(scripted(script), micro_batch_size=5, optimizer=settings)
    draw, tensors = Draw(11, 1, "student"), worker.roles["student"].tensors
    batch, parts = worker.batches.batch(draw, 8), []
    for rows in ((0, 5), (5, 8)):
        with worker.roles.use("student"):
            loss = sample_losses("student", worker.roles, batch.rows(*rows), draw).mean()
            parts.append(torch.autograd.grad(loss, tensors))
    gradient = [(3 * a + 0.5 * b) / 3.5 for a, b in zip(*parts, strict=True)]
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    assert norm > 1e-2
    changes, metrics = run(worker, "student")
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
    for change, g in zip(changes, gradient, strict=True):
        torch.testing.assert_close(change, -g * 1e-2 / norm, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), torch.tensor(0.0)])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_bad_normalizer_is_an_error_that_changes_nothing(
    build_worker, scripted, bad, position
) -> None:
    def script(role, roles, batch, draw) -> PhaseLoss:
        here = int(batch.sample_ids[0]) // 3 == position
        loss = sample_losses(role, roles, batch, draw).mean()
        return PhaseLoss(loss, normalizer=bad if here else 1.0)

    worker = build_worker(scripted(script), micro_batch_size=3)
    before = [p.detach().clone() for p in worker.roles["student"].tensors]
    with pytest.raises(TrainingError, match="student: 1 of 3 loss normalizers are not positive"):
        worker.run_phase(PhaseRequest(1, "student", "student", "student"))
    after = worker.roles["student"].tensors
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert worker.roles["student"].successful == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_both_kinds_in_one_phase_are_an_error(build_worker, scripted, position) -> None:
    def script(role, roles, batch, draw) -> PhaseLoss:
        here = int(batch.sample_ids[0]) // 3 == position
        loss = sample_losses(role, roles, batch, draw).mean()
        return PhaseLoss(loss, normalizer=None if here else 1.0)

    worker = build_worker(scripted(script), micro_batch_size=3)
    with pytest.raises(TrainingError, match="some micro-batches have a normalizer and some"):
        worker.run_phase(PhaseRequest(1, "student", "student", "student"))


def test_update_is_torchs_adamw_with_clipping(build_worker, scripted, storage) -> None:
    """Several updates against a plain loop: clip to the norm, then torch's AdamW."""

    def script(role, roles, batch, draw) -> PhaseLoss:
        return PhaseLoss(sample_losses(role, roles, batch, draw).mean())

    schedule = ScheduleSettings(kind="cosine", warmup_updates=2, updates=5, final_fraction=0.1)
    settings = OptimizerSettings(
        lr=0.05, betas=(0.8, 0.9), weight_decay=0.02, clip_norm=0.5, schedule=schedule
    )
    ours = build_worker(scripted(script), storage, optimizer=settings, micro_batch_size=3)
    plain = build_worker(scripted(script), storage, optimizer=settings)
    tensors = plain.roles["student"].tensors
    reference = torch.optim.AdamW(tensors, betas=(0.8, 0.9), weight_decay=0.02, foreach=False)
    clipped = []
    for cycle in range(1, 7):
        result = ours.run_phase(PhaseRequest(cycle, "student", "student", "student"))
        draw = Draw(11, cycle, "student")
        reference.zero_grad()
        with plain.roles.use("student"):
            batch = plain.batches.batch(draw, 8)
            sample_losses("student", plain.roles, batch, draw).mean().backward()
        gradients = [p.grad for p in tensors]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        clipped.append(bool(norm > 0.5))
        if norm > 0.5:
            for g in gradients:
                g.mul_(0.5 / norm)
        rate = 0.05 * schedule.factor(cycle - 1)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert result.metrics["lr"] == pytest.approx(rate)
        assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
        for a, b in zip(ours.roles["student"].tensors, tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert any(clipped)
