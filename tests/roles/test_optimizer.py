"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from fewstep.roles.optimizer import OptimizerSettings, ScheduleSettings


def test_constant_schedule_is_one() -> None:
    schedule = ScheduleSettings()
    assert [schedule.factor(n) for n in (0, 1, 10**6)] == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_steps_and_never_starts_at_zero() -> None:
    schedule = ScheduleSettings(warmup_updates=4)
    factors = [schedule.factor(n) for n in range(7)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0], abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_cosine_is_the_closed_form(warmup, final) -> None:
    total = 25
    schedule = ScheduleSettings(
        kind="cosine", warmup_updates=warmup, updates=total, final_fraction=final
    )
    for n in range(warmup, total + 1):
        angle = math.pi * (n - warmup) / (total - warmup)
        expected = final + (1 - final) * (1 + math.cos(angle)) / 2
        assert schedule.factor(n) == pytest.approx(expected, abs=1e-15)
    assert schedule.factor(warmup) == 1
    assert schedule.factor(total) == pytest.approx(final, abs=1e-15)
    assert schedule.factor(10 * total) == schedule.factor(total)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "cosine"},
        {"updates": 10},
        {"kind": "cosine", "updates": 5, "warmup_updates": 5},
        {"warmup_updates": -1},
        {"kind": "cosine", "updates": 5, "final_fraction": 1.5},
    ],
)
def test_impossible_schedules_are_refused(values) -> None:
    with pytest.raises(ValidationError):
        ScheduleSettings(**values)


def test_a_roles_rate_follows_its_successful_updates(build_roles, point_model, storage) -> None:
    optimizer = OptimizerSettings(lr=0.5, schedule=ScheduleSettings(warmup_updates=3))
    roles = build_roles(point_model, storage, optimizer=optimizer)
    roles["student"].successful, roles["student"].attempted = 1, 9
    assert roles["student"].learning_rate == pytest.approx(0.25)
    assert roles["fake_score"].learning_rate == pytest.approx(0.125)
    assert roles["teacher_score"].learning_rate == 0


def test_optimizer_is_the_textbook_adamw() -> None:
    """Loshchilov & Hutter, algorithm 2, written out."""
    settings = OptimizerSettings(
        lr=0.03, betas=(0.6, 0.9), eps=1e-6, weight_decay=0.1, clip_norm=None
    )
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))
    value = parameter.detach().clone()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    optimizer = settings.build([parameter])
    for step in range(1, 8):
        gradient = torch.randn(6, generator=generator, dtype=torch.float64)
        parameter.grad = gradient
        optimizer.step()
        first = 0.6 * first + 0.4 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        update = (first / (1 - 0.6**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
        value = value - 0.03 * (update + 0.1 * value)
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-12)
