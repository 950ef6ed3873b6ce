"""What a network predicts, and every conversion between the four kinds.

For a path `x = alpha * x0 + n * eps`:

| kind     | target              | source                                           |
|----------|---------------------|--------------------------------------------------|
| x0       | x0                  | -                                                |
| eps      | eps                 | DDPM, arXiv 2006.11239, eq. 11                   |
| v        | alpha * eps - n * x0 | Salimans & Ho, arXiv 2202.00512, appendix D     |
| velocity | eps - x0            | flow matching, arXiv 2209.03003, eq. 1           |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from fewstep.diffusion.paths import Path, expand_to

PredictionKind = Literal["x0", "eps", "v", "velocity"]


def _require_nonzero(value: Tensor, what: str) -> None:
    """Raise (RuntimeError) where a coefficient to divide by is zero.

    Asynchronous on an accelerator, so that it costs no synchronisation.
    """
    torch._assert_async((value != 0).all(), f"{what} is zero: this conversion divides by it")


def _coefficients(path: Path, sigma: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    sigma = sigma.to(x.dtype)
    return expand_to(path.alpha(sigma), x), expand_to(path.noise_scale(sigma), x)


def x0_from(kind: PredictionKind, output: Tensor, x: Tensor, sigma: Tensor, path: Path) -> Tensor:
    """The clean sample that a prediction implies.

    Args:
        kind: what `output` is.
        output: network output [B, ...].
        x: the noisy input, like `output`.
        sigma: [B] or [], the exact level of `x`.
        path: the noising path.

    Raises:
        RuntimeError: for kind "eps" where alpha(sigma) = 0 (the sample is not determined).
    """
    a, n = _coefficients(path, sigma, x)
    if kind == "x0":
        return output
    if kind == "eps":
        _require_nonzero(a, "alpha")
        return (x - n * output) / a
    if kind == "v":
        return (a * x - n * output) / (a * a + n * n)
    return (x - n * output) / (a + n)


def eps_from(kind: PredictionKind, output: Tensor, x: Tensor, sigma: Tensor, path: Path) -> Tensor:
    """The noise that a prediction implies. Arguments as for `x0_from`.

    Raises:
        RuntimeError: for kind "x0" where noise_scale(sigma) = 0.
    """
    a, n = _coefficients(path, sigma, x)
    if kind == "eps":
        return output
    if kind == "x0":
        _require_nonzero(n, "noise_scale")
        return (x - a * output) / n
    if kind == "v":
        return (n * x + a * output) / (a * a + n * n)
    return (x + a * output) / (a + n)


def convert(
    source: PredictionKind,
    target: PredictionKind,
    output: Tensor,
    x: Tensor,
    sigma: Tensor,
    path: Path,
) -> Tensor:
    """Turn a prediction of kind `source` into kind `target`; arguments as for `x0_from`."""
    if source == target:
        return output
    if target == "x0":
        return x0_from(source, output, x, sigma, path)
    if target == "eps":
        return eps_from(source, output, x, sigma, path)
    x0 = x0_from(source, output, x, sigma, path)
    eps = eps_from(source, output, x, sigma, path)
    return training_target(target, x0, eps, sigma, path)


def training_target(
    kind: PredictionKind, x0: Tensor, eps: Tensor, sigma: Tensor, path: Path
) -> Tensor:
    """What a perfect network of this kind outputs, given clean sample and noise [B, ...]."""
    if kind == "x0":
        return x0
    if kind == "eps":
        return eps
    if kind == "v":
        a, n = _coefficients(path, sigma, x0)
        return a * eps - n * x0
    return eps - x0


@final
@dataclass(frozen=True)
class Prediction:
    """A network output together with the input and the one exact sigma it belongs to.

    Attributes:
        kind: what `output` is.
        output: [B, ...].
        x: the noisy input, like `output`.
        sigma: [B] or [].
        path: the noising path of `x`.
    """

    kind: PredictionKind
    output: Tensor
    x: Tensor
    sigma: Tensor
    path: Path

    def to(self, kind: PredictionKind) -> Tensor:
        """The same prediction as another kind."""
        return convert(self.kind, kind, self.output, self.x, self.sigma, self.path)

    @property
    def x0(self) -> Tensor:
        """The clean sample it implies."""
        return self.to("x0")

    @property
    def eps(self) -> Tensor:
        """The noise it implies."""
        return self.to("eps")

    @property
    def velocity(self) -> Tensor:
        """The difference eps - x0 it implies."""
        return self.to("velocity")
