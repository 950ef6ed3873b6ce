from itertools import permutations
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fewstep.diffusion.paths import RectifiedFlow
from fewstep.diffusion.prediction import PredictionKind
from fewstep.errors import UserError
from fewstep.models.mixture import Mixture, PointNetwork, mixture_means, mixture_x0
from fewstep.models.teacher_check import LEVELS, check_prediction, one_step_errors

KINDS = get_args(PredictionKind)
PATH = RectifiedFlow(1.0)
MEANS = mixture_means(8, 2, 2.0)


def samples(count: int = 500) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0 = Mixture(MEANS, 0.1, PATH).sample_data(count, generator)
    return x0, torch.randn(x0.shape, generator=generator, dtype=torch.float64)


def teacher(actual: Any, declared: Any) -> tuple[Mixture, torch.nn.Module]:
    network = Mixture(MEANS, 0.1, PATH, actual).build_network()
    return Mixture(MEANS, 0.1, PATH, declared), network


@pytest.mark.parametrize("sigma", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_an_exact_teacher_is_that_of_the_posterior_mean(
    kind: str, sigma: float
) -> None:
    x0, eps = samples()
    model, network = teacher(kind, kind)
    levels = torch.full((len(x0),), sigma, dtype=torch.float64)
    mean = mixture_x0((1 - sigma) * x0 + sigma * eps, levels, MEANS, 0.1, PATH)
    expected = float((mean - x0).norm() / x0.norm())
    errors = one_step_errors(model, network, x0, eps, {}, sigma)
    assert errors[kind] == pytest.approx(expected, rel=1e-9)  # type: ignore[index]
    assert min(errors, key=lambda read: errors[read]) == kind  # type: ignore[call-overload]
    assert sigma == LEVELS[1] or expected < sigma
    check_prediction(model, network, x0, eps, {})


@pytest.mark.parametrize(("actual", "declared"), list(permutations(KINDS, 2)))
def test_a_teacher_of_another_kind_is_refused_with_the_figures(actual: str, declared: str) -> None:
    x0, eps = samples()
    model, network = teacher(actual, declared)
    with pytest.raises(UserError, match=f"read as '{declared}'.*%, and read as '{actual}' by"):
        check_prediction(model, network, x0, eps, {})


@pytest.mark.parametrize("declared", ["eps", "v", "velocity"])
def test_a_teacher_that_says_nothing_is_not_taken_for_another_kind(declared: str) -> None:
    x0, eps = samples()
    network = PointNetwork(2, 8, 1).double()
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    check_prediction(teacher(declared, declared)[0], network, x0, eps, {})
