import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewstep.diffusion.paths import EDM, Path, RectifiedFlow, VariancePreserving
from fewstep.diffusion.prediction import (
    Prediction,
    PredictionKind,
    convert,
    eps_from,
    training_target,
    x0_from,
)

PATHS = [RectifiedFlow(), VariancePreserving(), EDM()]
KINDS: tuple[PredictionKind, ...] = get_args(PredictionKind)
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda p: type(p).__name__)
every_kind = pytest.mark.parametrize("kind", KINDS)
# Where both coefficients are far enough from zero for a tight tolerance.
SIGMAS = {RectifiedFlow: (1e-3, 0.999), VariancePreserving: (1e-3, 1.0), EDM: (0.25, 1.0)}


def f64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(kind: str, wanted: str, output: Tensor, x: Tensor, a: float, n: float) -> np.ndarray:
    """Another way to convert: solve for (x0, eps) what input and output say of them."""
    rows = {"x0": [1.0, 0.0], "eps": [0.0, 1.0], "v": [-n, a], "velocity": [-1.0, 1.0]}
    both = np.stack([x.flatten().numpy(), output.flatten().numpy()])
    x0_and_eps = np.linalg.solve(np.array([[a, n], rows[kind]]), both)
    return (np.array(rows[wanted]) @ x0_and_eps).reshape(x.shape)


@every_path
@given(position=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_all_conversions_equal_a_linear_solve_and_round_trip(path: Path, position: float) -> None:
    low, high = SIGMAS[type(path)]
    sigma = f64(low + position * (high - low))
    a, n = float(path.alpha(sigma)), float(path.noise_scale(sigma))
    x0, eps = normal(3, 2), normal(3, 2, seed=1)
    x = path.add_noise(x0, eps, sigma)
    for source, target in itertools.product(KINDS, KINDS):
        output = training_target(source, x0, eps, sigma, path)
        converted = convert(source, target, output, x, sigma, path)
        expected = training_target(target, x0, eps, sigma, path)
        torch.testing.assert_close(converted, expected, rtol=1e-9, atol=1e-9)
        solved = reference(source, target, output, x, a, n)
        np.testing.assert_allclose(converted.numpy(), solved, rtol=1e-8, atol=1e-8)
        back = convert(target, source, converted, x, sigma, path)
        torch.testing.assert_close(back, output, rtol=1e-9, atol=1e-9)


@every_path
def test_conversions_work_for_outputs_that_no_data_explains(path: Path) -> None:
    """An untrained network's output is converted by the same linear map."""
    sigma, x, output = f64(0.6), normal(4, 3), normal(4, 3, seed=1)
    a, n = float(path.alpha(sigma)), float(path.noise_scale(sigma))
    for source, target in itertools.product(KINDS, KINDS):
        ours = convert(source, target, output, x, sigma, path)
        expected = reference(source, target, output, x, a, n)
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-9, atol=1e-9)


@every_path
@given(sigma=st.floats(1e-9, 1))
@settings(max_examples=100, deadline=None)
def test_velocity_to_x0_to_velocity_is_the_identity(path: Path, sigma: float) -> None:
    s, x, velocity = f64(sigma), normal(4, 3), normal(4, 3, seed=1)
    n = float(path.noise_scale(s))
    x0 = convert("velocity", "x0", velocity, x, s, path)
    # Near sigma = 0 the noise is a small difference of numbers of order 1.
    back = convert("x0", "velocity", x0, x, s, path)
    torch.testing.assert_close(back, velocity, rtol=0, atol=1e-14 * (1 + 1 / n))


def test_velocity_to_x0_of_a_flow_is_the_formula() -> None:
    x, velocity, sigma = normal(4, 3), normal(4, 3, seed=1), torch.rand(4, dtype=torch.float64)
    x0 = x0_from("velocity", velocity, x, sigma, RectifiedFlow())
    torch.testing.assert_close(x0, x - sigma[:, None] * velocity, rtol=1e-14, atol=1e-14)


@every_kind
@every_path
def test_sigmas_of_a_batch_are_used_sample_by_sample(path: Path, kind: PredictionKind) -> None:
    x, output = normal(3, 2, 2), normal(3, 2, 2, seed=1)
    sigma = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    for target in KINDS:
        together = convert(kind, target, output, x, sigma, path)
        for i in range(3):
            alone = convert(kind, target, output[i : i + 1], x[i : i + 1], sigma[i], path)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("target", ["x0", "v", "velocity"])
def test_noise_alone_says_nothing_of_the_sample(target: PredictionKind) -> None:
    x, sigma = normal(3, 2), torch.tensor([0.5, 1.0, 0.2], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="alpha is zero"):
        convert("eps", target, x, x, sigma, RectifiedFlow())


@pytest.mark.parametrize("target", ["eps", "v", "velocity"])
@every_path
def test_a_clean_sample_says_nothing_of_the_noise(path: Path, target: PredictionKind) -> None:
    x, sigma = normal(3, 2), torch.tensor([0.5, 0.0, 0.2], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="noise_scale is zero"):
        convert("x0", target, x, x, sigma, path)


@pytest.mark.parametrize("kind", ["v", "velocity"])
def test_mixed_kinds_are_defined_at_both_ends(kind: PredictionKind) -> None:
    x, output = normal(3, 2), normal(3, 2, seed=1)
    path = RectifiedFlow()
    for sigma in (f64(0.0), f64(1.0)):
        assert x0_from(kind, output, x, sigma, path).isfinite().all()
        assert eps_from(kind, output, x, sigma, path).isfinite().all()
    assert torch.equal(x0_from(kind, output, x, f64(0.0), path), x)
    assert torch.equal(eps_from(kind, output, x, f64(1.0), path), x)


@every_kind
def test_a_conversion_to_the_same_kind_is_the_tensor_itself(kind: PredictionKind) -> None:
    output = normal(3, 2)
    assert convert(kind, kind, output, normal(3, 2), f64(1.0), RectifiedFlow()) is output


@every_kind
@every_path
def test_prediction_object_gives_every_form(path: Path, kind: PredictionKind) -> None:
    x0, eps = normal(4, 3), normal(4, 3, seed=1)
    sigma = torch.tensor([0.3, 0.5, 0.7, 0.9], dtype=torch.float64)
    x = path.add_noise(x0, eps, sigma)
    output = training_target(kind, x0, eps, sigma, path)
    prediction = Prediction(kind, output, x, sigma, path)
    assert prediction.to(kind) is output
    for ours, expected in [
        (prediction.x0, x0),
        (prediction.eps, eps),
        (prediction.velocity, eps - x0),
        (prediction.to("v"), training_target("v", x0, eps, sigma, path)),
    ]:
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@every_kind
def test_predictions_keep_the_precision_of_the_samples(kind: PredictionKind) -> None:
    x = normal(4, 3).float()
    sigma = torch.full((4,), 0.5, dtype=torch.float64)
    prediction = Prediction(kind, x, x, sigma, VariancePreserving())
    assert {prediction.to(k).dtype for k in KINDS} == {torch.float32}


def test_training_targets_are_the_formulas() -> None:
    x0, eps, path = normal(4, 3), normal(4, 3, seed=1), VariancePreserving()
    sigma = torch.tensor([0.1, 0.2, 0.7, 1.0], dtype=torch.float64)
    a, n = path.alpha(sigma)[:, None], path.noise_scale(sigma)[:, None]
    assert torch.equal(training_target("x0", x0, eps, sigma, path), x0)
    assert torch.equal(training_target("eps", x0, eps, sigma, path), eps)
    torch.testing.assert_close(training_target("v", x0, eps, sigma, path), a * eps - n * x0)
    torch.testing.assert_close(training_target("velocity", x0, eps, sigma, path), eps - x0)
