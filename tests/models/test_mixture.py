import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewstep.diffusion.paths import EDM, RectifiedFlow, VariancePreserving
from fewstep.diffusion.prediction import Prediction
from fewstep.errors import UserError
from fewstep.models.mixture import (
    Mixture,
    MixtureSettings,
    PointNetwork,
    mixture_log_density,
    mixture_means,
    mixture_x0,
)

STD = 0.3
PATHS = {
    "rectified_flow": RectifiedFlow(),
    "variance_preserving": VariancePreserving(),
    "edm": EDM(),
}
# Noise from nearly nothing to everything; EDM's seventh power makes 0.25 small already.
LEVELS = {
    "rectified_flow": [0.02, 0.3, 0.6, 0.98, 1.0],
    "variance_preserving": [0.002, 0.3, 0.6, 1.0],
    "edm": [0.3, 0.5, 0.8, 1.0],
}
every_path = pytest.mark.parametrize("name", PATHS)
every_dimension = pytest.mark.parametrize("dimensions", [1, 2, 8, 64])
every_kind = pytest.mark.parametrize("kind", ["x0", "eps", "v", "velocity"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(name: str, dimensions: int, kind: str = "velocity") -> Mixture:
    made = MixtureSettings(
        dimensions=dimensions,
        components=5,
        std=STD,
        path=name,  # type: ignore[arg-type]
        prediction=kind,  # type: ignore[arg-type]
    ).build()
    assert isinstance(made, Mixture)
    return made


def noised(model: Mixture, level: float, count: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Samples at every kind of place: clean ones, noised to one level; x, sigma and the noise."""
    x0 = model.sample_data(count, generator(1))
    eps = torch.randn(x0.shape, generator=generator(2), dtype=torch.float64)
    sigma = torch.full((count,), level, dtype=torch.float64)
    return model.path.add_noise(x0, eps, sigma), sigma, eps


def autograd_score(x: Tensor, sigma: Tensor, model: Mixture) -> Tensor:
    x = x.detach().requires_grad_()
    density = mixture_log_density(x, sigma, model.means, model.std, model.path)
    (score,) = torch.autograd.grad(density.sum(), x)
    return score


def agree(ours: Tensor, exact: Tensor, tolerance: float = 1e-10) -> None:
    """To the tolerance, relative to the largest entry where that is above one."""
    scale = exact.abs().max().clamp(min=1)
    assert ((ours - exact).abs().max() / scale).item() < tolerance


@every_path
@every_dimension
@every_kind
def test_teacher_equals_the_gradient_of_the_log_density(
    name: str, dimensions: int, kind: str
) -> None:
    model = build(name, dimensions, kind)
    network = model.build_network()
    for level in LEVELS[name]:
        x, sigma, _ = noised(model, level)
        a, n = (f(sigma)[:, None] for f in (model.path.alpha, model.path.noise_scale))
        score = autograd_score(x, sigma, model)
        prediction = Prediction(
            model.prediction, model.forward(network, x, sigma, {}), x, sigma, model.path
        )
        agree(-n * score, prediction.eps)
        x0 = mixture_x0(x, sigma, model.means, model.std, model.path)
        agree((a * x0 - x) / n**2 * n, score * n)  # Tweedie, in units of the noise
        # No clean sample follows from a noise network where alpha is zero.
        if not (kind == "eps" and a[0] == 0):
            agree(prediction.x0, x0)
            agree((a * prediction.x0 - x) / n, score * n)
        if a[0] > 0:
            agree((x + n**2 * score) / a, x0)


@every_path
def test_score_is_that_of_the_density_in_its_own_units(name: str) -> None:
    """Not only times the noise: the score itself, relative to its size."""
    model = build(name, 2)
    for level in LEVELS[name]:
        x, sigma, _ = noised(model, level)
        a, n = (f(sigma)[:, None] for f in (model.path.alpha, model.path.noise_scale))
        x0 = mixture_x0(x, sigma, model.means, model.std, model.path)
        score = autograd_score(x, sigma, model)
        torch.testing.assert_close((a * x0 - x) / n**2, score, rtol=1e-8, atol=1e-10)


@every_path
@every_dimension
def test_density_equals_a_loop_over_components(name: str, dimensions: int) -> None:
    model = build(name, dimensions)
    for level in LEVELS[name]:
        x, sigma, _ = noised(model, level, count=4)
        a, n = float(model.path.alpha(sigma)[0]), float(model.path.noise_scale(sigma)[0])
        covariance = torch.eye(dimensions, dtype=torch.float64) * ((a * STD) ** 2 + n**2)
        parts = [
            torch.distributions.MultivariateNormal(a * mean, covariance).log_prob(x)
            for mean in model.means
        ]
        expected = torch.logsumexp(torch.stack(parts), 0) - math.log(5)
        ours = mixture_log_density(x, sigma, model.means, model.std, model.path)
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-9)


@every_path
def test_density_integrates_to_one(name: str) -> None:
    model = build(name, 1)
    for level in LEVELS[name]:
        sigma = torch.tensor(level, dtype=torch.float64)
        a, n = float(model.path.alpha(sigma)), float(model.path.noise_scale(sigma))
        reach = 2 * a + 12 * math.hypot(a * STD, n)
        x = torch.linspace(-reach, reach, 20_001, dtype=torch.float64)
        density = mixture_log_density(x[:, None], sigma, model.means, STD, model.path).exp()
        assert float(torch.trapezoid(density, x)) == pytest.approx(1, abs=1e-9)


@every_path
def test_density_at_zero_noise_is_that_of_the_data(name: str) -> None:
    model = build(name, 2)
    x, zero = model.sample_data(8, generator()), torch.tensor(0.0, dtype=torch.float64)
    squares = ((x[:, None] - model.means) ** 2).sum(-1)
    density = (-squares / (2 * STD**2)).exp().mean(1) / (2 * math.pi * STD**2)
    ours = mixture_log_density(x, zero, model.means, STD, model.path)
    torch.testing.assert_close(ours, density.log())
    torch.testing.assert_close(mixture_x0(x, zero, model.means, STD, model.path), x)


@given(level=st.floats(0.05, 1), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_denoiser_is_the_mean_of_the_clean_samples_by_quadrature(level: float, seed: int) -> None:
    """E[x0 | x] by integrating prior times likelihood over a line of clean samples."""
    path, means = RectifiedFlow(), mixture_means(3, 1, 1.0)
    sigma = torch.tensor(level, dtype=torch.float64)
    x = torch.randn(1, 1, generator=generator(seed), dtype=torch.float64)
    x0 = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    prior = (-((x0[:, None] - means.T) ** 2) / (2 * STD**2)).exp().sum(1)
    likelihood = (-((x - (1 - level) * x0) ** 2) / (2 * level**2)).exp().flatten()
    weights = prior * likelihood
    expected = torch.trapezoid(weights * x0, x0) / torch.trapezoid(weights, x0)
    ours = mixture_x0(x, sigma, means, STD, path)
    assert float(ours) == pytest.approx(float(expected), rel=1e-8, abs=1e-8)


@every_path
@every_kind
def test_sigmas_may_be_one_or_one_a_sample(name: str, kind: str) -> None:
    model = build(name, 2, kind)
    network = model.build_network()
    levels = torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64)
    x = torch.randn(3, 2, generator=generator(), dtype=torch.float64)
    together = network(x, levels)
    density = mixture_log_density(x, levels, model.means, STD, model.path)
    for i in range(3):
        torch.testing.assert_close(together[i], network(x[i : i + 1], levels[i : i + 1])[0])
        alone = mixture_log_density(x[i : i + 1], levels[i], model.means, STD, model.path)
        torch.testing.assert_close(density[i : i + 1], alone)


def test_teacher_keeps_the_precision_of_the_samples() -> None:
    model = build("rectified_flow", 2)
    network = model.build_network()
    x, sigma, _ = noised(model, 0.5)
    exact, rounded = network(x, sigma), network(x.float(), sigma.float())
    assert exact.dtype == torch.float64
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), exact, rtol=1e-4, atol=1e-5)
    assert torch.equal(network.get_buffer("means"), model.means)


def test_exact_samples_have_the_moments_of_the_mixture() -> None:
    model = build("rectified_flow", 2)
    x, count = model.sample_data(40_000, generator()), 40_000
    covariance = torch.cov(model.means.T, correction=0) + STD**2 * torch.eye(2)
    spread = float(covariance.diagonal().max().sqrt())
    assert (x.mean(0) - model.means.mean(0)).abs().max() < 4 * spread / math.sqrt(count)
    torch.testing.assert_close(torch.cov(x.T), covariance.double(), rtol=0.03, atol=0.03)
    nearest = torch.cdist(x, model.means).argmin(1)
    assert (torch.bincount(nearest, minlength=5) / count - 0.2).abs().max() < 0.02
    assert torch.equal(x, model.sample_data(40_000, generator()))


def test_means_are_where_they_should_be() -> None:
    assert mixture_means(5, 1, 2.0).flatten().tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0]
    circle = mixture_means(8, 2, 2.0)
    torch.testing.assert_close(circle.norm(dim=1), torch.full((8,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(
        circle.roll(1, 0).sub(circle).norm(dim=1).std(), circle.new_zeros(())
    )
    high = mixture_means(5, 64, 2.0)
    torch.testing.assert_close(high.norm(dim=1), torch.full((5,), 2.0, dtype=torch.float64))
    assert torch.cdist(high, high).fill_diagonal_(9).min() > 1
    assert torch.equal(high, mixture_means(5, 64, 2.0))


def test_student_is_a_perceptron_that_does_not_know_the_means() -> None:
    model = build("rectified_flow", 2)
    student = model.student_network(model.build_network())
    assert isinstance(student, PointNetwork)
    assert not student.training
    x = torch.randn(3, 2, generator=generator())
    first, other = torch.full((3,), 0.2), torch.full((3,), 0.9)
    assert student(x, first).shape == (3, 2)
    assert not torch.allclose(student(x, first), student(x, other))
    assert sum(1 for m in student.modules() if isinstance(m, torch.nn.Linear)) == 4


def test_a_mixture_has_no_files(tmp_path) -> None:
    model = build("rectified_flow", 2)
    with pytest.raises(UserError, match="no weights to load"):
        model.load_network(tmp_path)
    with pytest.raises(UserError, match="no format"):
        model.save_network(model.build_network(), tmp_path)
    with pytest.raises(ValueError, match="no unconditional prediction"):
        model.unconditional({})


@pytest.mark.parametrize(
    "wrong", [{"dimensions": 0}, {"dimensions": 65}, {"components": 0}, {"std": 0.0}, {"path": "x"}]
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MixtureSettings(**wrong)
