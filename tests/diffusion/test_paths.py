import math

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewstep.diffusion.paths import EDM, Path, RectifiedFlow, VariancePreserving, expand_to

PATHS = [
    RectifiedFlow(),
    VariancePreserving(),
    VariancePreserving(beta_start=1e-4, beta_end=0.02, beta_schedule="linear"),
    EDM(),
]
every_path = pytest.mark.parametrize("path", PATHS, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ddpm_table(path: VariancePreserving) -> np.ndarray:
    """alphas_cumprod as every DDPM code computes it."""
    if path.beta_schedule == "linear":
        betas = np.linspace(path.beta_start, path.beta_end, path.train_timesteps)
    else:
        roots = np.linspace(path.beta_start**0.5, path.beta_end**0.5, path.train_timesteps)
        betas = roots**2
    return np.cumprod(1 - betas)


@every_path
@every_dtype
def test_zero_sigma_leaves_the_input_bit_equal(path: Path, dtype: torch.dtype) -> None:
    x0, eps = normal(6, 3, 4, dtype=dtype), normal(6, 3, 4, seed=1, dtype=dtype)
    for sigma in (torch.zeros(6, dtype=dtype), torch.tensor(0.0, dtype=dtype)):
        noised = path.add_noise(x0, eps, sigma)
        assert noised.dtype == dtype
        assert torch.equal(noised, x0)


@every_path
def test_add_noise_equals_a_loop_over_samples(path: Path) -> None:
    x0, eps = normal(5, 2, 3), normal(5, 2, 3, seed=1)
    sigma = torch.tensor([0.0, 1.0, 0.3, 0.77, 1e-3], dtype=torch.float64)
    noised = path.add_noise(x0, eps, sigma)
    for i in range(5):
        a, n = float(path.alpha(sigma[i])), float(path.noise_scale(sigma[i]))
        torch.testing.assert_close(noised[i], a * x0[i] + n * eps[i], rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(path.add_noise(x0, eps, sigma[i])[i], noised[i])


@every_path
def test_coefficients_are_monotone_from_data_to_noise(path: Path) -> None:
    sigma = torch.linspace(0, 1, 4001, dtype=torch.float64)
    a, n = path.alpha(sigma), path.noise_scale(sigma)
    assert a[0] == 1
    assert n[0] == 0
    assert (a.diff() <= 0).all()
    assert (n.diff() > 0).all()
    assert ((n / a).diff() > 0).all()


@every_path
def test_prior_is_what_noise_alone_becomes_at_sigma_one(path: Path) -> None:
    eps = normal(4, 3)
    one = torch.ones((), dtype=torch.float64)
    expected = path.add_noise(torch.zeros_like(eps), eps, one)
    torch.testing.assert_close(path.prior(eps), expected, rtol=0, atol=0)
    assert path.prior(eps.float()).dtype == torch.float32


def test_prior_of_known_paths() -> None:
    eps = normal(4, 3)
    torch.testing.assert_close(RectifiedFlow().prior(eps), eps)
    torch.testing.assert_close(EDM().prior(eps), 80 * eps)
    last = ddpm_table(VariancePreserving())[-1]
    torch.testing.assert_close(VariancePreserving().prior(eps), math.sqrt(1 - last) * eps)


def test_rectified_flow_formulas() -> None:
    sigma = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    path = RectifiedFlow()
    assert path.alpha(sigma).tolist() == [1.0, 0.75, 0.0]
    assert path.noise_scale(sigma).tolist() == [0.0, 0.25, 1.0]
    assert path.timestep(sigma).tolist() == [0.0, 250.0, 1000.0]
    assert RectifiedFlow(timestep_scale=1.0).timestep(sigma).tolist() == sigma.tolist()


@pytest.mark.parametrize("path", PATHS[1:3], ids=repr)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-7)], ids=str
)
def test_variance_preserving_equals_the_ddpm_table_at_every_timestep(
    path: VariancePreserving, dtype: torch.dtype, tolerance: float
) -> None:
    table = ddpm_table(path)
    # The way a grid of float32 sigmas comes about, rounding included.
    sigma = (torch.arange(path.train_timesteps) + 1).to(dtype) / path.train_timesteps
    for ours, exact in [
        (path.alpha(sigma), np.sqrt(table)),
        (path.noise_scale(sigma), np.sqrt(1 - table)),
    ]:
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.double().numpy(), exact, rtol=tolerance)
    timestep = path.timestep(sigma).double().numpy()
    np.testing.assert_allclose(timestep, np.arange(path.train_timesteps), atol=1e-4)


@pytest.mark.parametrize("timestep", [0, 1, 500, 999])
def test_variance_preserving_noises_like_diffusers(timestep: int) -> None:
    x0, eps = normal(3, 4, dtype=torch.float32), normal(3, 4, seed=1, dtype=torch.float32)
    scheduler = DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear")
    expected = scheduler.add_noise(x0, eps, torch.full((3,), timestep))
    sigma = torch.full((3,), (timestep + 1) / 1000)
    torch.testing.assert_close(
        VariancePreserving().add_noise(x0, eps, sigma), expected, rtol=1e-5, atol=2e-6
    )


@given(sigma=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_variance_preserving_interpolates_log_alpha_bar_and_keeps_the_variance(
    sigma: float,
) -> None:
    path = VariancePreserving()
    s = torch.tensor(sigma, dtype=torch.float64)
    a, n = float(path.alpha(s)), float(path.noise_scale(s))
    assert a * a + n * n == pytest.approx(1, abs=1e-12)
    logs = np.concatenate([[0.0], np.log(ddpm_table(path))])
    expected = np.interp(sigma * 1000, np.arange(1001), logs)
    assert 2 * math.log(a) == pytest.approx(expected, abs=1e-12)
    assert float(path.timestep(s)) == pytest.approx(max(sigma * 1000 - 1, 0), abs=1e-9)


@given(exponent=st.floats(-12, 0))
@settings(max_examples=50, deadline=None)
def test_variance_preserving_takes_no_small_sigma_for_zero(exponent: float) -> None:
    """Nothing is rounded to a table entry: the least noise is still noise, in proportion."""
    path = VariancePreserving()
    for dtype in (torch.float32, torch.float64):
        sigma = torch.tensor(1e-3 * 10**exponent, dtype=dtype)
        n = path.noise_scale(sigma).double() ** 2
        # log(alpha_bar) is linear up to the first entry, at sigma = 1/1000.
        expected = -math.expm1(math.log1p(-0.00085) * 10**exponent)
        assert float(n) == pytest.approx(expected, rel=1e-6)


def test_variance_preserving_refuses_an_unknown_schedule() -> None:
    path = VariancePreserving(beta_schedule="cosine")
    with pytest.raises(ValueError, match="'cosine': use 'linear' or 'scaled_linear'"):
        path.alpha(torch.tensor(0.5))


@given(sigma=st.floats(0.05, 1), rho=st.floats(1, 10), noise_max=st.floats(1, 500))
@settings(max_examples=100, deadline=None)
def test_edm_sigma_is_the_inverse_of_its_noise_scale(
    sigma: float, rho: float, noise_max: float
) -> None:
    path, s = EDM(noise_max, rho), torch.tensor(sigma, dtype=torch.float64)
    torch.testing.assert_close(path.sigma(path.noise_scale(s)), s, rtol=1e-12, atol=0)


def test_edm_equal_steps_are_the_grid_of_the_paper() -> None:
    sigma_min, sigma_max, rho, steps = 0.002, 80.0, 7.0, 18
    i = np.arange(steps)
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    paper = (high + i / (steps - 1) * (low - high)) ** rho  # eq. 5
    path = EDM(sigma_max, rho)
    least = float(path.sigma(torch.tensor(sigma_min, dtype=torch.float64)))
    ours = path.noise_scale(torch.linspace(1, least, steps, dtype=torch.float64))
    np.testing.assert_allclose(ours.numpy(), paper, rtol=1e-12)
    torch.testing.assert_close(
        path.timestep(torch.tensor([1.0, 0.5])), torch.tensor([80.0, 80 * 0.5**7]).log() / 4
    )


def test_expand_to_lines_a_sample_value_up_with_its_batch() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert expand_to(torch.tensor([1.0, 2.0]), x).shape == (2, 1, 1, 1)
    assert expand_to(torch.tensor(1.0), x).shape == ()
    assert expand_to(torch.tensor([1.0, 2.0]), torch.zeros(2)).shape == (2,)
