"""A Gaussian mixture, whose scores are known in closed form: the exact test bed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path as FilePath
from typing import Annotated, Literal, final

import torch
from pydantic import Field
from torch import Tensor, nn

from fewstep.diffusion.paths import EDM, Path, RectifiedFlow, VariancePreserving, expand_to
from fewstep.diffusion.prediction import PredictionKind, convert
from fewstep.errors import UserError
from fewstep.models.model import Condition, Model
from fewstep.settings import Settings

Positive = Annotated[int, Field(gt=0)]
PATHS: dict[str, type[Path]] = {
    "rectified_flow": RectifiedFlow,
    "variance_preserving": VariancePreserving,
    "edm": EDM,
}


@final
class MixtureSettings(Settings):
    """Equal Gaussians on a circle (or, beyond two dimensions, at fixed random points)."""

    family: Literal["mixture"] = "mixture"
    weights: None = Field(None, description="none: the teacher is exact")
    dimensions: Annotated[int, Field(ge=1, le=64)] = Field(2, description="of the points")
    components: Positive = Field(8, description="number of Gaussians")
    radius: Annotated[float, Field(gt=0)] = Field(2.0, description="distance of the means from 0")
    std: Annotated[float, Field(gt=0)] = Field(0.2, description="of each component")
    path: Literal["rectified_flow", "variance_preserving", "edm"] = "rectified_flow"
    prediction: PredictionKind = "velocity"
    width: Positive = Field(128, description="hidden width of the student's network")
    depth: Positive = Field(3, description="hidden layers of the student's network")

    def build(self) -> Model:
        """The adapter."""
        means = mixture_means(self.components, self.dimensions, self.radius)
        path = PATHS[self.path]()
        return Mixture(means, self.std, path, self.prediction, self.width, self.depth)


def mixture_means(components: int, dimensions: int, radius: float) -> Tensor:
    """Component means, float64 [K, D]: a line (D = 1), a circle (D = 2) or random directions."""
    if dimensions == 1:
        return torch.linspace(-radius, radius, components, dtype=torch.float64)[:, None]
    if dimensions == 2:
        angles = torch.arange(components, dtype=torch.float64) * (2 * math.pi / components)
        return radius * torch.stack([angles.cos(), angles.sin()], dim=1)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(components, dimensions, generator=generator, dtype=torch.float64)
    means: Tensor = radius * directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    return means


def mixture_log_density(
    x: Tensor, sigma: Tensor, means: Tensor, std: float | Tensor, path: Path
) -> Tensor:
    """Log density of an equal-weight mixture noised to level sigma.

    A component N(mu, std^2) becomes N(alpha * mu, alpha^2 std^2 + n^2).

    Args:
        x: [B, D].
        sigma: [B] or [].
        means: [K, D].
        std: of every component.
        path: the noising path.

    Returns:
        [B].
    """
    a, n = (expand_to(f(sigma), x) for f in (path.alpha, path.noise_scale))
    variance = (a * std) ** 2 + n**2
    shape = (len(x), len(means))
    squares = ((x[:, None, :] - a[..., None] * means) ** 2).sum(-1).expand(shape)
    exponent = -squares / (2 * variance)
    log_norm = 0.5 * x.shape[1] * torch.log(2 * math.pi * variance).expand(len(x), 1)
    return torch.logsumexp(exponent, 1) - log_norm[:, 0] - math.log(len(means))


def mixture_x0(x: Tensor, sigma: Tensor, means: Tensor, std: float | Tensor, path: Path) -> Tensor:
    """The exact denoiser E[x0 | x_sigma] = sum_k w_k(x) * posterior mean of component k: [B, D].

    Arguments as for `mixture_log_density`.
    """
    a, n = (expand_to(f(sigma), x) for f in (path.alpha, path.noise_scale))
    variance = (a * std) ** 2 + n**2
    squares = ((x[:, None, :] - a[..., None] * means) ** 2).sum(-1)
    weights = torch.softmax(-squares / (2 * variance), dim=1)
    gain = a * std**2 / variance
    mean = weights @ means
    return mean + gain * (x - a * mean)


@final
class MixtureNetwork(nn.Module):
    """The exact teacher as a network: no parameters, output of the wanted kind."""

    def __init__(self, means: Tensor, std: float, path: Path, prediction: PredictionKind) -> None:
        """`means`: [K, D] float64; used in the precision of the samples."""
        super().__init__()
        self.register_buffer("means", means)
        self.std = std
        self.path = path
        self.prediction = prediction

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x: [B, D], sigma: [B] -> [B, D]."""
        means = self.get_buffer("means").to(x.dtype)
        x0 = mixture_x0(x, sigma, means, self.std, self.path)
        return convert("x0", self.prediction, x0, x, sigma, self.path)


@final
class PointNetwork(nn.Module):
    """A multilayer perceptron on points and sigma."""

    def __init__(self, dimensions: int, width: int, depth: int) -> None:
        """Hidden layers: `depth` of `width`."""
        super().__init__()
        sizes = [dimensions + 3, *[width] * depth]
        layers = [
            module
            for fan_in, fan_out in itertools.pairwise(sizes)
            for module in (nn.Linear(fan_in, fan_out), nn.SiLU())
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(width, dimensions))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x: [B, D], sigma: [B] -> [B, D]."""
        level = torch.stack([sigma, torch.cos(3 * sigma), torch.sin(3 * sigma)], dim=1)
        output: Tensor = self.layers(torch.cat([x, level.to(x.dtype)], dim=1))
        return output


@final
class Mixture(Model):
    """Adapter: the teacher is exact, student and fake score are small perceptrons."""

    def __init__(
        self,
        means: Tensor,
        std: float,
        path: Path,
        prediction: PredictionKind = "velocity",
        width: int = 128,
        depth: int = 3,
    ) -> None:
        """`means`: [K, D] float64; `std`: of every component."""
        self.means = means
        self.std = std
        self.path = path
        self.prediction = prediction
        self.width = width
        self.depth = depth
        self.sample_shape = (means.shape[1],)

    def build_network(self) -> nn.Module:
        """The exact teacher."""
        return MixtureNetwork(self.means, self.std, self.path, self.prediction).eval()

    def student_network(self, teacher: nn.Module) -> nn.Module:
        """A new perceptron: a student that knows nothing of the mixture."""
        return PointNetwork(self.sample_shape[0], self.width, self.depth).eval()

    def load_network(self, directory: FilePath) -> nn.Module:
        """There is nothing to load."""
        raise UserError("model.weights: a mixture has no weights to load")

    def save_network(self, network: nn.Module, directory: FilePath) -> None:
        """There is no family's own format."""
        raise UserError("a mixture's networks have no format to be exported to")

    def forward(self, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """See `Model.forward`."""
        output: Tensor = network(x, sigma)
        return output

    def feature_blocks(self, network: nn.Module) -> dict[str, nn.Module]:
        """The perceptron's activations; the exact teacher has none."""
        return {k: m for k, m in network.named_modules() if isinstance(m, nn.SiLU)}

    def sample_data(self, count: int, generator: torch.Generator) -> Tensor:
        """Exact samples of the mixture, float64 [count, D]."""
        component = torch.randint(len(self.means), (count,), generator=generator)
        noise = torch.randn(count, self.sample_shape[0], generator=generator, dtype=torch.float64)
        return self.means[component] + self.std * noise
