import pytest
import torch
from torch import Tensor

from fewstep.diffusion.losses import (
    denoising_loss,
    dmd_direction,
    dmd_surrogate,
    mean_per_sample,
    replace_nonfinite,
)
from fewstep.diffusion.paths import EDM, Path, RectifiedFlow, VariancePreserving
from fewstep.diffusion.prediction import Prediction, PredictionKind

PATHS = [RectifiedFlow(), VariancePreserving(), EDM()]
SIGMAS = torch.tensor([0.3, 0.5, 0.95], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_mean_per_sample_is_each_samples_own() -> None:
    x = normal(3, 2, 4)
    expected = [x[i].sum().item() / 8 for i in range(3)]
    assert mean_per_sample(x).tolist() == pytest.approx(expected)


def test_direction_equals_a_loop() -> None:
    x0, fake, real = normal(4, 2, 3), normal(4, 2, 3, seed=1), normal(4, 2, 3, seed=2)
    x0 = x0 * torch.tensor([1.0, 10.0, 0.1, 100.0])[:, None, None]
    direction = dmd_direction(x0, fake, real)
    for i in range(4):
        entries = [abs(a - b) for a, b in zip(x0[i].flatten(), real[i].flatten(), strict=True)]
        expected = (fake[i] - real[i]) / (sum(entries) / 6)
        torch.testing.assert_close(direction[i], expected, rtol=1e-13, atol=0)


def test_direction_does_not_depend_on_the_other_samples() -> None:
    x0, fake, real = normal(4, 5), normal(4, 5, seed=1), normal(4, 5, seed=2)
    alone = torch.cat([dmd_direction(x0[[i]], fake[[i]], real[[i]]) for i in range(4)])
    assert torch.equal(dmd_direction(x0, fake, real), alone)


def test_direction_points_from_the_real_to_the_fake_estimate() -> None:
    """Descending it moves a sample from where the fake score puts it to the teacher's place."""
    x0, fake, real = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    assert dmd_direction(x0, fake, real).tolist() == [[1.0, -2.0]]


def test_direction_has_a_floor_where_the_teacher_agrees_entirely() -> None:
    x0 = normal(2, 3)
    assert torch.equal(dmd_direction(x0, x0, x0), torch.zeros_like(x0))
    torch.testing.assert_close(
        dmd_direction(x0, x0 + 1, x0, floor=0.5), torch.full((2, 3), 2.0).double()
    )


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), ()])
def test_surrogate_gradient_is_the_direction_over_the_entries(shape: tuple[int, ...]) -> None:
    x0 = normal(3, *shape, 1).requires_grad_()
    direction = normal(3, *shape, 1, seed=1)
    losses = dmd_surrogate(x0, direction)
    assert losses.shape == (3,)
    weights = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(losses @ weights, x0)
    entries = x0[0].numel()
    expected = direction * weights.reshape(-1, *[1] * (x0.ndim - 1)) / entries
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_surrogate_value_and_its_stopped_target() -> None:
    x0, direction = normal(3, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_()
    losses = dmd_surrogate(x0, direction)
    torch.testing.assert_close(losses, 0.5 * (direction**2).mean(1))
    losses.sum().backward()
    assert direction.grad is None


def test_nonfinite_entries_are_counted_and_zeroed() -> None:
    x = torch.tensor([[1.0, float("nan"), 2.0], [float("inf"), -float("inf"), -3.0]])
    clean, count = replace_nonfinite(x)
    assert clean.tolist() == [[1.0, 0.0, 2.0], [0.0, 0.0, -3.0]]
    assert count.tolist() == [1, 2]
    assert count.dtype == torch.int64


def test_finite_entries_are_left_alone() -> None:
    x = normal(3, 4)
    clean, count = replace_nonfinite(x)
    assert torch.equal(clean, x)
    assert count.tolist() == [0, 0, 0]


def implied(kind: PredictionKind, output: Tensor, x: Tensor, a: Tensor, n: Tensor) -> Tensor:
    """The clean sample of each kind, written out."""
    return {
        "x0": output,
        "eps": (x - n * output) / a,
        "v": (a * x - n * output) / (a**2 + n**2),
        "velocity": (x - n * output) / (a + n),
    }[kind]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("kind", ["x0", "eps", "v", "velocity"])
def test_denoising_losses_are_their_formulas(path: Path, kind: PredictionKind) -> None:
    x0, eps, output = normal(3, 2, 2), normal(3, 2, 2, seed=1), normal(3, 2, 2, seed=2)
    a, n = (f(SIGMAS)[:, None, None] for f in (path.alpha, path.noise_scale))
    x = a * x0 + n * eps
    prediction = Prediction(kind, output, x, SIGMAS, path)
    target = {"x0": x0, "eps": eps, "v": a * eps - n * x0, "velocity": eps - x0}[kind]
    native = ((output - target) ** 2).mean((1, 2))
    x0_error = ((implied(kind, output, x, a, n) - x0) ** 2).mean((1, 2))
    ratio = (n / a).flatten()
    edm = x0_error * (ratio**2 + 0.7**2) / (0.7 * ratio) ** 2
    for weighting, expected in [("native", native), ("x0", x0_error), ("x0_edm", edm)]:
        loss = denoising_loss(prediction, x0, eps, weighting, sigma_data=0.7)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("path", PATHS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("weighting", ["native", "x0", "x0_edm"])
def test_denoising_loss_of_the_truth_is_zero(path: Path, weighting: str) -> None:
    x0, eps = normal(3, 4), normal(3, 4, seed=1)
    x = path.add_noise(x0, eps, SIGMAS)
    prediction = Prediction("velocity", eps - x0, x, SIGMAS, path)
    loss = denoising_loss(prediction, x0, eps, weighting)  # type: ignore[arg-type]
    assert loss.abs().max() < 1e-20


def test_edm_weighting_stays_finite_at_both_ends_of_a_flow() -> None:
    x0, eps, output = normal(2, 3), normal(2, 3, seed=1), normal(2, 3, seed=2)
    sigma, path = torch.tensor([0.0, 1.0], dtype=torch.float64), RectifiedFlow()
    prediction = Prediction("velocity", output, path.add_noise(x0, eps, sigma), sigma, path)
    assert denoising_loss(prediction, x0, eps, "x0_edm").isfinite().all()


def test_least_loss_is_at_the_conditional_mean() -> None:
    """For two equally likely clean samples the best constant answer is their mean."""
    x0 = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    eps = torch.zeros(2, 1, dtype=torch.float64)
    sigma = torch.full((2,), 0.4, dtype=torch.float64)
    answer = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    path = RectifiedFlow()
    optimizer = torch.optim.SGD([answer], lr=0.4)
    for _ in range(200):
        prediction = Prediction("x0", answer.expand(2, 1), x0, sigma, path)
        optimizer.zero_grad()
        denoising_loss(prediction, x0, eps, "x0").mean().backward()
        optimizer.step()
    assert answer.item() == pytest.approx(2.0)
