"""The losses against closed forms, and the exact penalty against plain double backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fewstep.diffusion.gan import (
    accuracy,
    approximate_r1,
    classifier_loss,
    exact_r1,
    generator_loss,
    linear_surrogate,
)

REAL = torch.tensor([1.5, -2.0, 0.3], dtype=torch.float64)
FAKE = torch.tensor([0.5, 1.0, -4.0], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_both_losses_are_cross_entropies() -> None:
    for real, fake, found, made in zip(
        REAL.tolist(),
        FAKE.tolist(),
        classifier_loss(REAL, FAKE).tolist(),
        generator_loss(FAKE).tolist(),
        strict=True,
    ):
        p, q = 1 / (1 + math.exp(-real)), 1 / (1 + math.exp(-fake))
        assert found == pytest.approx(-math.log(p) - math.log(1 - q), rel=1e-12)
        assert made == pytest.approx(-math.log(q), rel=1e-12)


def test_huge_logits_have_finite_losses_and_the_gradient_does_not_vanish() -> None:
    logits = torch.tensor([-1e4, 1e4], dtype=torch.float64, requires_grad=True)
    generator_loss(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [-1, 0]  # saturates where it deceives, not where it fails


def test_accuracy_counts_both_kinds() -> None:
    assert accuracy(REAL, FAKE).tolist() == [0.5, 0, 1]


def test_the_surrogate_has_the_value_and_the_gradient_that_it_is_given() -> None:
    x0 = normal(3, 2, 4).requires_grad_()
    gradient, value = normal(3, 2, 4, seed=1), normal(3, seed=2)
    found = linear_surrogate(x0, gradient, value)
    assert torch.equal(found, value)
    found.sum().backward()
    assert torch.equal(x0.grad, gradient)


def test_approximate_r1_of_a_linear_classifier_is_the_slope_along_delta() -> None:
    weight, x, std = normal(5, seed=3), normal(20000, 5), 0.3
    delta = normal(20000, 5, seed=4)
    found = approximate_r1(x @ weight + 0.7, (x + std * delta) @ weight + 0.7)
    torch.testing.assert_close(found, std**2 * (delta @ weight) ** 2)
    assert float(found.mean()) == pytest.approx(std**2 * float(weight @ weight), rel=0.03)


def test_exact_r1_of_a_linear_classifier_is_its_squared_norm() -> None:
    weight = normal(5, seed=3).requires_grad_()
    found = exact_r1(lambda x: [x], lambda seen: seen[0] @ weight + 0.7, normal(4, 5))
    torch.testing.assert_close(found, (weight @ weight).detach().expand(4))
    found.mean().backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())


class Attends(nn.Module):
    """Two layers of features, one by torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = torch.tanh(self.first(x))
        q = self.second(h)[:, None]
        return [h, nn.functional.scaled_dot_product_attention(q, q, torch.tanh(q))[:, 0]]


def test_exact_r1_is_that_of_plain_double_backward_and_leaves_the_features_alone() -> None:
    torch.manual_seed(0)
    features, head = Attends().double(), nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 1))
    head.double()

    def classify(seen: Sequence[Tensor]) -> Tensor:
        logits: Tensor = head(torch.cat(list(seen), 1))
        return logits[:, 0]

    x = normal(3, 4)
    found = exact_r1(features, classify, x)
    found.mean().backward()
    ours = [p.grad.clone() for p in head.parameters() if p.grad is not None]
    assert all(p.grad is None for p in features.parameters())

    whole = x.clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits = classify(features(whole))
        (slope,) = torch.autograd.grad(logits.sum(), whole, create_graph=True)
        expected = (slope**2).sum(1)
        torch.testing.assert_close(found.detach(), expected.detach())
        exact = torch.autograd.grad(expected.mean(), list(head.parameters()), allow_unused=True)
    assert exact[-1] is None  # a slope does not depend on the last bias
    for gradient, reference in zip(ours, exact[:-1], strict=False):
        assert float(reference.abs().max()) > 0
        torch.testing.assert_close(gradient, reference)
