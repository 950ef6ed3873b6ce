"""Metrics on samples: how close generated images come to real ones.

The functions compare feature vectors, real [N, D] with samples [M, D], in float64 on the CPU, and
raise ValueError for too few rows, NaN or infinite values, or another D. None of them reads or moves
a global random generator.
"""

import math
from dataclasses import asdict, dataclass
from typing import Final, final

import torch
from torch import Tensor, nn

from fewstep.features import Classifier, FeatureNetwork

PRECISION_NEIGHBOURS: Final = 3
COVERAGE_NEIGHBOURS: Final = 5
HIGHER_IS_BETTER: Final = (
    "class_accuracy",
    "clip_score",
    "precision",
    "recall",
    "density",
    "coverage",
)


def frechet_distance(real: Tensor, samples: Tensor) -> float:
    """Squared Fréchet distance of Gaussians fitted to each set (FID, arXiv 1706.08500, eq. 6)."""
    # torchmetrics takes seconds to import, and most commands evaluate nothing.
    from torchmetrics.image.fid import FrechetInceptionDistance

    real, samples = _feature_pair(real, samples, at_least=(2, 2))
    metric = FrechetInceptionDistance(
        _Identity(real.shape[1]),
        sync_on_compute=False,  # one process may evaluate alone
    )
    metric.update(real, real=True)
    metric.update(samples, real=False)
    return max(0.0, metric.compute().item())  # rounding has either sign when the sets are equal


def kernel_distance(
    real: Tensor, samples: Tensor, *, subsets: int = 100, subset_size: int = 250, seed: int = 0
) -> float:
    """Unbiased squared MMD with the kernel (x.y / D + 1)^3 (KID, arXiv 1801.01401, section 4).

    The mean over seeded random subsets, of at most the smaller set's size, on which its
    expectation does not depend. It may be negative.
    """
    from torchmetrics.image.kid import poly_mmd

    real, samples = _feature_pair(real, samples, at_least=(2, 2))
    size = min(subset_size, len(real), len(samples))
    random = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        rows, others = (torch.randperm(len(x), generator=random)[:size] for x in (real, samples))
        values.append(poly_mmd(real[rows], samples[others]))
    return torch.stack(values).mean().item()


def precision_recall(
    real: Tensor, samples: Tensor, neighbours: int = PRECISION_NEIGHBOURS
) -> tuple[float, float]:
    """Improved precision and recall (arXiv 1904.06991, eqs. 1 and 2), both in [0, 1].

    Precision is the part of the samples that lie in the closed ball of some real point, which
    reaches to its k-th nearest real neighbour; recall is the same with the sets exchanged.
    """
    real, samples = _feature_pair(real, samples, at_least=(neighbours + 1, neighbours + 1))
    distances = _distances(samples, real)
    precise = (distances <= _neighbour_distances(real, neighbours)).any(1)
    recalled = (distances <= _neighbour_distances(samples, neighbours).unsqueeze(1)).any(0)
    return precise.double().mean().item(), recalled.double().mean().item()


def density_coverage(
    real: Tensor, samples: Tensor, neighbours: int = COVERAGE_NEIGHBOURS
) -> tuple[float, float]:
    """Density in [0, N / k] and coverage in [0, 1] (arXiv 2002.09797, section 3).

    Balls are open, as in the authors' code: so equal sets of distinct points have density 1.
    """
    real, samples = _feature_pair(real, samples, at_least=(neighbours + 1, 1))
    inside = _distances(samples, real) < _neighbour_distances(real, neighbours)
    density = inside.double().sum(1).mean() / neighbours
    return density.item(), inside.any(0).double().mean().item()


def sliced_wasserstein_distance(
    real: Tensor, samples: Tensor, *, projections: int = 128, seed: int = 0
) -> float:
    """Root mean square 2-Wasserstein distance along seeded directions (Bonneel et al. 2015).

    Exact along each direction, also for sets of unequal size: both quantile functions are constant
    between consecutive multiples of 1/N and 1/M.
    """
    real, samples = _feature_pair(real, samples, at_least=(1, 1))
    random = torch.Generator().manual_seed(seed)
    directions = torch.randn(real.shape[1], projections, generator=random, dtype=torch.float64)
    directions /= directions.norm(dim=0)
    steps = [torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x) for x in (real, samples)]
    levels = torch.cat(steps).sort().values
    widths = levels.diff(prepend=levels.new_zeros(1))
    middles = levels - widths / 2
    left, right = (
        (x @ directions).sort(0).values[(middles * len(x)).long().clamp_(max=len(x) - 1)]
        for x in (real, samples)
    )
    return math.sqrt((widths @ (left - right).square()).mean().item())


def class_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Part of the samples, logits [M, classes], classified as the labels int64 [M] asked for."""
    _check_labels(labels, *logits.shape)
    return (logits.argmax(1) == labels).double().mean().item()


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """Samples per class: int64 [M] in 0..classes-1 to int64 [classes]."""
    _check_labels(labels, len(labels), classes)
    return torch.bincount(labels, minlength=classes)


def class_balance(predicted: Tensor, asked: Tensor, classes: int) -> float:
    """Total variation distance, in [0, 1], of predicted [M] and asked [L] class frequencies."""
    p, q = (class_counts(x, classes).double() / len(x) for x in (predicted, asked))
    return 0.5 * (p - q).abs().sum().item()


@dataclass(frozen=True)
class SampleMetrics:
    """The figures of one set of samples; class figures are None without labels or a classifier."""

    frechet_distance: float
    kernel_distance: float
    precision: float
    recall: float
    density: float
    coverage: float
    class_accuracy: float | None
    class_balance: float | None

    def as_dict(self) -> dict[str, float | None]:
        """The figures by name."""
        return asdict(self)


@final
class Evaluator:
    """Compares samples with one set of real images [N, ...], whose features it keeps.

    `real_labels` are int64 [N] or None; `network` also gives the class figures if it is a
    `Classifier`. Errors are those of this module's functions, and labels that do not match.
    """

    def __init__(self, real: Tensor, real_labels: Tensor | None, network: FeatureNetwork) -> None:
        self._network = network
        self._real = self._look_at(real, real_labels, at_least=COVERAGE_NEIGHBOURS + 1)

    def evaluate(self, samples: Tensor, labels: Tensor | None = None) -> SampleMetrics:
        """All figures of samples [M, ...] and the classes they were asked for, int64 [M].

        Without labels there is no class accuracy, and the balance is against the real labels.
        """
        return self._compare(*self._look_at(samples, labels, at_least=PRECISION_NEIGHBOURS + 1))

    def floor(self, seed: int = 0) -> SampleMetrics:
        """The figures of a random half of the real images against all of them."""
        count = len(self._real[0])
        half = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: count // 2]
        features, *optional = self._real
        return self._compare(features[half], *(x if x is None else x[half] for x in optional))

    def _look_at(
        self, images: Tensor, labels: Tensor | None, at_least: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Features, logits and labels of images, all on the CPU."""
        _check_rows("images", images, at_least)
        logits = self._network.classify(images) if isinstance(self._network, Classifier) else None
        if labels is not None:
            labels = labels.cpu()
            _check_labels(labels, len(images), None if logits is None else logits.shape[1])
        return self._network.features(images), logits, labels

    def _compare(
        self, features: Tensor, logits: Tensor | None, labels: Tensor | None
    ) -> SampleMetrics:
        real, _, real_labels = self._real
        asked = real_labels if labels is None else labels
        accuracy = balance = None
        if logits is not None and labels is not None:
            accuracy = class_accuracy(logits, labels)
        if logits is not None and asked is not None:
            balance = class_balance(logits.argmax(1), asked, logits.shape[1])
        return SampleMetrics(
            frechet_distance(real, features),
            kernel_distance(real, features),
            *precision_recall(real, features),
            *density_coverage(real, features),
            accuracy,
            balance,
        )


class _Identity(nn.Identity):
    """Lets torchmetrics take features for images; it asks for their number beforehand."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features: Final = num_features


def _distances(left: Tensor, right: Tensor) -> Tensor:
    """Euclidean distances, float64 [N, M], by differences: exactly zero between equal points."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def _neighbour_distances(points: Tensor, k: int) -> Tensor:
    """Distance [N] of each point [N, D] to its k-th nearest other point of the set."""
    return _distances(points, points).fill_diagonal_(-1.0).kthvalue(k + 1, dim=1).values


def _feature_pair(
    real: Tensor, samples: Tensor, at_least: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    for name, x, rows in zip(("real features", "samples"), (real, samples), at_least, strict=True):
        if x.ndim != 2:
            raise ValueError(f"{name} must be [rows, features], got shape {tuple(x.shape)}")
        _check_rows(name, x, rows)
    if real.shape[1] != samples.shape[1]:
        raise ValueError(
            f"real features have {real.shape[1]} dimensions, samples {samples.shape[1]}"
        )
    return real.detach().cpu().double(), samples.detach().cpu().double()


def _check_rows(name: str, rows: Tensor, at_least: int) -> None:
    if len(rows) < at_least:
        raise ValueError(f"{len(rows)} {name} are too few: at least {at_least} are needed")
    if bad := int((~rows.isfinite()).flatten(1).any(1).sum()):
        raise ValueError(f"{bad} of {len(rows)} {name} contain NaN or infinite values")


def _check_labels(labels: Tensor, rows: int, classes: int | None) -> None:
    if labels.shape != (rows,) or labels.dtype != torch.int64:
        raise ValueError(f"need int64 labels [{rows}], got {labels.dtype} {tuple(labels.shape)}")
    if bad := int(((labels < 0) | (labels >= (classes or math.inf))).sum()):
        raise ValueError(f"{bad} of {rows} labels are not in 0..{classes - 1 if classes else ''}")
