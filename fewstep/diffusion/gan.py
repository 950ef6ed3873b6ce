"""Losses of a classifier of real and made samples, and of who is to deceive it; per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import softplus


def generator_loss(logits: Tensor) -> Tensor:
    """The non-saturating loss softplus(-D(x)) of who made x: [B].

    Goodfellow et al., arXiv 1406.2661, section 3; DMD2, arXiv 2405.14867, eq. 4, on noised samples.

    Args:
        logits: of made samples [B]; above 0: taken for real.
    """
    return softplus(-logits)


def classifier_loss(real: Tensor, fake: Tensor) -> Tensor:
    """softplus(-D(real)) + softplus(D(fake)), the classifier's cross entropy: [B].

    Sources as for `generator_loss`.

    Args:
        real: logits of real samples [B].
        fake: logits of made samples [B].
    """
    return softplus(-real) + softplus(fake)


def accuracy(real: Tensor, fake: Tensor) -> Tensor:
    """The share of the two that is told rightly, 0, 0.5 or 1: [B]; arguments as before."""
    return 0.5 * ((real > 0).to(real.dtype) + (fake < 0).to(fake.dtype))


def linear_surrogate(x0: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
    """A loss of this value whose gradient with respect to x0 is the given one: [B].

    Args:
        x0: samples with a graph [B, ...].
        gradient: detached, like `x0`.
        value: detached [B].
    """
    product = (x0 * gradient).flatten(1).sum(1)
    return value + (product - product.detach())


def approximate_r1(logits: Tensor, perturbed: Tensor) -> Tensor:
    """(D(x) - D(x + std * delta))^2, about std^2 |grad D(x)|^2 in the mean over delta: [B].

    Lin et al., arXiv 2501.08316, section 3.3. Both must be of the very same noised input, but for
    delta.

    Args:
        logits: of real noised samples [B].
        perturbed: of the same ones, a little moved [B].
    """
    return (logits - perturbed) ** 2


def exact_r1(
    features: Callable[[Tensor], Sequence[Tensor]],
    classify: Callable[[Sequence[Tensor]], Tensor],
    x: Tensor,
) -> Tensor:
    """|grad D(x)|^2 with respect to x, for D = classify(features): [B].

    Mescheder et al., arXiv 1801.04406, eq. 9, without its factor. The gradient is that with respect
    to what `classify` depends on, and to nothing in `features`: with J the features' Jacobian and
    g = grad classify, |J^T g|^2 has the differential 2 (J J^T g) dg.

    Args:
        features: of inputs, differentiable twice.
        classify: from them to logits [B].
        x: real noised samples [B, ...].
    """
    # Fused kernels for attention cannot be differentiated twice.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        x = x.detach().requires_grad_()
        found = features(x)
        seen = [each.detach().requires_grad_() for each in found]
        slopes = torch.autograd.grad(classify(seen).sum(), seen, create_graph=True)
        fixed = [slope.detach().requires_grad_() for slope in slopes]
        (gradient,) = torch.autograd.grad(found, x, fixed, create_graph=True)
        along = torch.autograd.grad(gradient, fixed, gradient.detach())
        products = [(a * slope).flatten(1).sum(1) for a, slope in zip(along, slopes, strict=True)]
    product = torch.stack(products).sum(0)
    value = (gradient.detach() ** 2).flatten(1).sum(1)
    return value + 2 * (product - product.detach())
