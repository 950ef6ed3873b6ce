import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewstep.diffusion.timesteps import (
    few_step_grid,
    logit_normal_sigma,
    shift_of_grid,
    shift_sigma,
    uniform_sigma,
)


def test_four_steps_at_shift_three() -> None:
    assert few_step_grid(4, 3.0) == pytest.approx([1, 0.9, 0.75, 0.5], abs=1e-15)


def test_four_timesteps_at_shift_five_are_shifted_once() -> None:
    timesteps = [1000 * sigma for sigma in few_step_grid(4, 5.0)]
    assert timesteps == pytest.approx([1000, 937.5, 2500 / 3, 625], abs=1e-9)


def test_shift_one_leaves_the_grid_linear() -> None:
    assert few_step_grid(4) == (1.0, 0.75, 0.5, 0.25)
    assert few_step_grid(1, 7.0) == (1.0,)


@given(steps=st.integers(1, 200), shift=st.floats(0.1, 20))
@settings(max_examples=60, deadline=None)
def test_every_grid_starts_at_noise_falls_and_stops_before_data(steps: int, shift: float) -> None:
    grid = few_step_grid(steps, shift)
    assert len(grid) == steps
    assert grid[0] == 1
    assert all(a > b > 0 for a, b in pairwise(grid))


@pytest.mark.parametrize(("steps", "shift"), [(0, 1.0), (-1, 1.0), (4, 0.0), (4, -1.0)])
def test_impossible_grids_are_refused(steps: int, shift: float) -> None:
    with pytest.raises(ValueError, match=r"is (0|-1|0\.0|-1\.0): "):
        few_step_grid(steps, shift)


def test_nan_shift_is_refused() -> None:
    with pytest.raises(ValueError, match="shift is nan"):
        few_step_grid(4, math.nan)


@given(sigma=st.floats(0, 1), shift=st.floats(0.1, 20), other=st.floats(0.1, 20))
@settings(max_examples=100, deadline=None)
def test_shifts_form_a_group(sigma: float, shift: float, other: float) -> None:
    s = torch.tensor(sigma, dtype=torch.float64)
    once = shift_sigma(s, shift)
    assert 0 <= once <= 1
    torch.testing.assert_close(shift_sigma(once, 1 / shift), s, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shift_sigma(once, other), shift_sigma(s, shift * other))
    # Written with the odds of noise to data, a shift is a factor.
    if 0 < sigma < 1 - 1e-6:  # nearer to 1 the odds are rounding
        odds = float(once / (1 - once))
        assert odds == pytest.approx(shift * sigma / (1 - sigma), rel=1e-6)


def test_uniform_sigmas_are_shifted_then_clamped() -> None:
    uniform = torch.tensor([0.001, 0.25, 0.5, 0.999], dtype=torch.float64)
    assert torch.equal(uniform_sigma(uniform), uniform)
    shifted = uniform_sigma(uniform, 3.0, 0.02, 0.98)
    assert shifted.tolist() == pytest.approx([0.02, 0.5, 0.75, 0.98], abs=1e-15)


def test_logit_normal_sigmas_are_the_formula() -> None:
    z = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    expected = [1 / (1 + math.exp(-(0.5 + 2 * v))) for v in z.tolist()]
    assert logit_normal_sigma(z, 0.5, 2.0).tolist() == pytest.approx(expected)
    shifted = [3 * e / (1 + 2 * e) for e in expected]
    assert logit_normal_sigma(z, 0.5, 2.0, 3.0).tolist() == pytest.approx(shifted)


@pytest.mark.parametrize("steps", [2, 4, 50])
@pytest.mark.parametrize("shift", [0.4, 1.0, 3.0, 3.158192909])
def test_the_shift_of_a_grid_is_found(steps: int, shift: float) -> None:
    assert shift_of_grid(few_step_grid(steps, shift)) == shift


@pytest.mark.parametrize(
    ("sigmas", "shift"),
    [([1.0], 1.0), ([0.9], None), ([0.9, 0.3], None), ([1, 1], None), ([1, 0.9, 0.5], None)],
)
def test_sigmas_that_are_no_shifted_grid_have_no_shift(sigmas: list[float], shift: float) -> None:
    assert shift_of_grid(sigmas) == shift
