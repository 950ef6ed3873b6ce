"""The averaged student."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from fewstep.roles.ema import EMASettings, ema_update

NAMES = ("student", "student_ema")


def test_update_is_the_closed_form_after_many_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    decay, steps = 0.7, 12
    values = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(steps + 1)]
    average = [values[0].clone()]
    for value in values[1:]:
        ema_update(average, [value], decay)
    expected = decay**steps * values[0] + sum(
        (1 - decay) * decay ** (steps - k) * values[k] for k in range(1, steps + 1)
    )
    torch.testing.assert_close(average[0], expected, rtol=1e-13, atol=1e-13)


def test_decay_zero_copies() -> None:
    average = [torch.zeros(3)]
    ema_update(average, [torch.arange(3.0)], 0.0)
    assert torch.equal(average[0], torch.arange(3.0))


@pytest.mark.parametrize("current", [torch.float16, torch.bfloat16, torch.float64])
def test_average_keeps_its_own_precision(current) -> None:
    average = [torch.full((2,), 1.0)]
    ema_update(average, [torch.full((2,), 2.0, dtype=current)], 1 - 2**-12)
    assert average[0].dtype == torch.float32
    # In half precision the small step would be lost.
    assert torch.equal(average[0], torch.full((2,), 1 + 2.0**-12))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_role_is_kept_in_float32_at_least(build_roles, point_model, storage, dtype) -> None:
    roles = build_roles(
        point_model, storage, NAMES, ("student",), ema=EMASettings(), dtype=dtype, scramble=False
    )
    assert {p.dtype for p in roles["student"].tensors} == {dtype}
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert {p.dtype for p in roles["student_ema"].tensors} == {kept}


@pytest.mark.parametrize("start", [1, 3])
def test_average_follows_from_the_start_update_on(build_roles, point_model, storage, start) -> None:
    ema = EMASettings(decay=0.5, start=start)
    roles = build_roles(point_model, storage, NAMES, ("student",), ema=ema, scramble=False)
    student, average = roles["student"], roles["student_ema"]
    expected = [p.detach().clone() for p in student.tensors]
    generator = torch.Generator().manual_seed(0)
    for update in range(1, 6):
        with torch.no_grad():
            for p in student.tensors:
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        student.successful = update
        roles.update_ema()
        if update >= start:
            expected = [0.5 * e + 0.5 * p for e, p in zip(expected, student.tensors, strict=True)]
        for own, value in zip(average.tensors, expected, strict=True):
            torch.testing.assert_close(own, value, rtol=1e-13, atol=1e-13, check_device=False)
    assert roles.ema_updates == 6 - start


def test_nothing_happens_without_an_average(build_roles, point_model, storage) -> None:
    roles = build_roles(point_model, storage)
    roles["student"].successful = 1
    roles.update_ema()
    assert roles.ema_updates == 0


@pytest.mark.parametrize("values", [{"decay": 1.0}, {"decay": -0.1}, {"start": 0}])
def test_settings_have_bounds(values) -> None:
    with pytest.raises(ValidationError):
        EMASettings(**values)
