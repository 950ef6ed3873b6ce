import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fewstep.diffusion.paths import EDM, Path, RectifiedFlow, VariancePreserving
from fewstep.diffusion.prediction import Prediction
from fewstep.diffusion.samplers import (
    euler_transition,
    renoise_transition,
    sample_few_step,
    sample_heun,
    sigma_tensor,
    transition,
)

PATHS = [RectifiedFlow(), VariancePreserving(), EDM()]
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda p: type(p).__name__)
MEAN, STD = 0.7, 0.4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def f64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class Spy:
    """A network of the velocity kind that writes down its calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inputs: list[Tensor] = []
        self.sigmas: list[float] = []

    def __call__(self, x: Tensor, sigma: Tensor) -> Prediction:
        assert sigma.ndim == 0
        assert sigma.dtype == x.dtype
        self.inputs.append(x)
        self.sigmas.append(float(sigma))
        return Prediction("velocity", self.velocity(x, sigma), x, sigma, self.path)

    @staticmethod
    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.sin(x) + sigma * x


def gaussian(path: Path) -> Callable[[Tensor, Tensor], Prediction]:
    """The exact denoiser of data ~ N(MEAN, STD^2)."""

    def predict(x: Tensor, sigma: Tensor) -> Prediction:
        a, n = path.alpha(sigma), path.noise_scale(sigma)
        variance = a**2 * STD**2 + n**2
        return Prediction("x0", MEAN + a * STD**2 / variance * (x - a * MEAN), x, sigma, path)

    return predict


def gaussian_flow(x: Tensor, path: Path) -> Tensor:
    """Where the ODE takes points from sigma = 1: each keeps its own number of deviations."""
    a, n = path.alpha(f64(1.0)), path.noise_scale(f64(1.0))
    return MEAN + STD * (x - a * MEAN) / torch.sqrt(a**2 * STD**2 + n**2)


def ddpm_coefficients(sigma: float) -> tuple[float, float]:
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    alpha_bar = np.cumprod(1 - betas)[round(sigma * 1000) - 1]
    return math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)


def test_euler_on_a_flow_is_eulers_step() -> None:
    x, sigma, following = normal(4, 3), f64(0.8), f64(0.3)
    prediction = Spy(RectifiedFlow())(x, sigma)
    expected = x + (0.3 - 0.8) * Spy.velocity(x, sigma)
    torch.testing.assert_close(euler_transition(prediction, following), expected)


def test_euler_on_a_variance_preserving_path_is_ddim() -> None:
    x, eps = normal(4, 3), normal(4, 3, seed=1)
    path = VariancePreserving()
    prediction = Prediction("eps", eps, x, f64(0.8), path)
    (a, n), (a_next, n_next) = ddpm_coefficients(0.8), ddpm_coefficients(0.3)
    expected = a_next * (x - n * eps) / a + n_next * eps
    torch.testing.assert_close(euler_transition(prediction, f64(0.3)), expected)


def test_euler_on_edm_is_euler_in_the_noise_scale() -> None:
    x, x0, path = normal(4, 3), normal(4, 3, seed=1), EDM()
    n, n_next = 80 * 0.8**7, 80 * 0.3**7
    slope = (x - x0) / n  # EDM, eq. 3
    prediction = Prediction("x0", x0, x, f64(0.8), path)
    torch.testing.assert_close(euler_transition(prediction, f64(0.3)), x + (n_next - n) * slope)


@every_path
def test_renoise_is_the_path_applied_to_the_predicted_sample(path: Path) -> None:
    x, x0, eps = normal(4, 3), normal(4, 3, seed=1), normal(4, 3, seed=2)
    prediction = Prediction("x0", x0, x, f64(0.8), path)
    a, n = float(path.alpha(f64(0.3))), float(path.noise_scale(f64(0.3)))
    expected = a * x0 + n * eps
    torch.testing.assert_close(renoise_transition(prediction, f64(0.3), eps), expected)
    chosen = transition("renoise", prediction, f64(0.3), lambda: eps)
    torch.testing.assert_close(chosen, expected)


def test_the_ode_asks_for_no_noise() -> None:
    def refuse() -> Tensor:
        raise AssertionError("noise was asked for")

    prediction = Prediction("x0", normal(2, 3), normal(2, 3), f64(0.8), RectifiedFlow())
    transition("euler", prediction, f64(0.3), refuse)


@pytest.mark.parametrize("grid", [(1.0,), (1.0, 0.9, 0.75, 0.5), (1.0, 1 / 3, 0.1)])
@pytest.mark.parametrize("kind", ["euler", "renoise"])
def test_few_step_sampler_equals_a_sampler_written_out(kind: str, grid: Sequence[float]) -> None:
    noise = [normal(4, 3, seed=step) for step in range(len(grid))]
    asked: list[int] = []

    def fresh(step: int) -> Tensor:
        asked.append(step)
        return noise[step]

    spy = Spy(RectifiedFlow())
    result = sample_few_step(spy, noise[0], grid, kind, fresh)  # type: ignore[arg-type]
    x = noise[0]
    for step, sigma in enumerate(grid):
        torch.testing.assert_close(spy.inputs[step], x)
        velocity = Spy.velocity(x, f64(sigma))
        x0 = x - sigma * velocity
        if step + 1 == len(grid):
            break
        following = grid[step + 1]
        if kind == "euler":
            x = x + (following - sigma) * velocity
        else:
            x = (1 - following) * x0 + following * noise[step + 1]
    torch.testing.assert_close(result, x0)
    assert spy.sigmas == list(grid)
    assert asked == ([] if kind == "euler" else list(range(1, len(grid))))


def test_heun_calls_twice_a_step_but_once_for_the_last() -> None:
    spy = Spy(RectifiedFlow())
    sample_heun(spy, normal(4, 3), (1.0, 0.6, 0.2))
    assert spy.sigmas == [1.0, 0.6, 0.6, 0.2, 0.2]


def test_heun_on_edm_is_heuns_rule_in_the_share_of_noise() -> None:
    """With tau = n / (1 + n) and y = x / (1 + n) the ODE reads dy/dtau = eps - x0."""
    path, grid = EDM(), (1.0, 0.7, 0.5)
    denoise = gaussian(path)
    x = start = path.prior(normal(4, 3))
    scales = [80 * sigma**7 for sigma in grid]

    def slope(y: Tensor, n: float, sigma: float) -> Tensor:
        x0 = denoise(y * (1 + n), f64(sigma)).x0
        return (y * (1 + n) - x0) / n - x0

    y = x / (1 + scales[0])
    for i in range(2):
        n, following = scales[i], scales[i + 1]
        step = following / (1 + following) - n / (1 + n)
        first = slope(y, n, grid[i])
        y = y + step * (first + slope(y + step * first, following, grid[i + 1])) / 2
    x0 = denoise(y * (1 + scales[2]), f64(grid[2])).x0
    torch.testing.assert_close(sample_heun(denoise, start, grid), x0)


def test_heun_on_a_flow_is_the_trapezoidal_rule() -> None:
    x, grid = normal(4, 3), (1.0, 0.6, 0.2)
    result = sample_heun(Spy(RectifiedFlow()), x, grid)
    for sigma, following in zip(grid, (*grid[1:], 0.0), strict=True):
        slope = Spy.velocity(x, f64(sigma))
        euler = x + (following - sigma) * slope
        if following == 0:
            x = euler
            break
        x = x + (following - sigma) * (slope + Spy.velocity(euler, f64(following))) / 2
    torch.testing.assert_close(result, x)


@every_path
def test_heun_converges_to_second_order_and_euler_to_first(path: Path) -> None:
    x = path.prior(normal(64))
    exact, predict = gaussian_flow(x, path), gaussian(path)
    # The noise of a variance-preserving path grows like the root of sigma: square the grid.
    power = 2 if isinstance(path, VariancePreserving) else 1

    def errors(sampler: Callable[[Sequence[float]], Tensor]) -> list[float]:
        counts = (32, 64, 128)
        grids = [[(1 - i / n) ** power for i in range(n)] for n in counts]
        return [float((sampler(grid) - exact).abs().max()) for grid in grids]

    euler = errors(lambda grid: sample_few_step(predict, x, grid, "euler"))
    heun = errors(lambda grid: sample_heun(predict, x, grid))
    for coarse, fine in pairwise(euler):
        assert 0.8 < math.log2(coarse / fine) < 1.3
    for coarse, fine in pairwise(heun):
        assert 1.7 < math.log2(coarse / fine) < 2.4
    assert heun[-1] < euler[-1] / 10


@every_path
def test_renoise_keeps_the_marginals_of_an_exact_denoiser_of_one_point(path: Path) -> None:
    """Data that is one point: every prediction is that point, whatever the noise."""
    point = normal(3)

    def predict(x: Tensor, sigma: Tensor) -> Prediction:
        return Prediction("x0", point.expand(len(x), 3), x, sigma, path)

    result = sample_few_step(
        predict, normal(4, 3), (1.0, 0.6, 0.2), "renoise", lambda step: normal(4, 3, seed=step)
    )
    torch.testing.assert_close(result, point.expand(4, 3))


def test_empty_grids_are_refused() -> None:
    spy = Spy(RectifiedFlow())
    with pytest.raises(ValueError, match="grid is empty"):
        sample_few_step(spy, normal(2, 3), (), "euler")
    with pytest.raises(ValueError, match="grid is empty"):
        sample_heun(spy, normal(2, 3), ())
    assert spy.sigmas == []


def test_renoise_without_noise_is_refused_before_the_network_is_called() -> None:
    spy = Spy(RectifiedFlow())
    with pytest.raises(ValueError, match="source of fresh noise"):
        sample_few_step(spy, normal(2, 3), (1.0, 0.5), "renoise")
    assert spy.sigmas == []
    assert sample_few_step(spy, normal(2, 3), (1.0,), "renoise").shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sigma_tensors_have_the_samples_precision(dtype: torch.dtype) -> None:
    sigma = sigma_tensor(1 / 3, torch.zeros(2, dtype=dtype))
    assert sigma.shape == ()
    assert sigma.dtype == dtype
    assert sigma.item() == torch.tensor(1 / 3, dtype=dtype).item()
