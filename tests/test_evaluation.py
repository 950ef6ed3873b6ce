import math
from typing import get_args

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from fewstep import evaluation, features
from fewstep.data.dataset import Dataset
from fewstep.data.digits import load_digits
from fewstep.errors import UserError
from fewstep.figures import LOWER_IS_BETTER
from fewstep.validation import ValidationSettings, build_evaluator

FIGURES = [
    "frechet_distance",
    "kernel_distance",
    "precision",
    "recall",
    "density",
    "coverage",
    "class_accuracy",
    "class_balance",
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_moments(points, mean, covariance):
    """Move points so that their sample mean and covariance are exactly the given ones."""
    centred = points - points.mean(0)
    white = centred @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(centred.T))).T
    return white @ torch.linalg.cholesky(covariance).T + mean


# Fréchet distance


def test_frechet_distance_of_commuting_gaussians_is_the_closed_form():
    # |m - n|^2 + sum (sqrt(a) - sqrt(b))^2 for diagonal covariances a and b
    a, b = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([4.0, 1.0, 0.25]).double()
    m, n = torch.tensor([1.0, 0.0, 2.0]).double(), torch.tensor([0.0, 3.0, 2.0]).double()
    real = with_moments(normal(50, 3), m, a.diag())
    samples = with_moments(normal(70, 3, seed=1), n, b.diag())
    expected = (m - n).square().sum() + (a.sqrt() - b.sqrt()).square().sum()
    assert evaluation.frechet_distance(real, samples) == pytest.approx(expected.item(), rel=1e-9)


def test_frechet_distance_equals_the_matrix_square_root_formula():
    real = normal(200, 16) @ normal(16, 16, seed=1) + 100
    samples = normal(150, 16, seed=2) @ normal(16, 16, seed=3) + 101
    x, y = real.numpy(), samples.numpy()
    c, d = np.cov(x.T), np.cov(y.T)
    means = ((x.mean(0) - y.mean(0)) ** 2).sum()
    expected = means + np.trace(c + d - 2 * scipy.linalg.sqrtm(c @ d).real)
    assert evaluation.frechet_distance(real, samples) == pytest.approx(expected, rel=1e-8)


def test_frechet_distance_holds_for_fewer_samples_than_dimensions():
    real = normal(10, 16) @ normal(16, 16, seed=1) + 100
    samples = normal(19, 16, seed=2) @ normal(16, 16, seed=3) + 101
    # C = X'X and D = Y'Y give Tr sqrt(C D) = the sum of the singular values of X Y'
    x = (real - real.mean(0)) / math.sqrt(9)
    y = (samples - samples.mean(0)) / math.sqrt(18)
    traces = x.square().sum() + y.square().sum() - 2 * torch.linalg.svdvals(x @ y.T).sum()
    expected = ((real.mean(0) - samples.mean(0)).square().sum() + traces).item()
    assert evaluation.frechet_distance(real, samples) == pytest.approx(expected, rel=1e-6)


def test_frechet_distance_of_equal_sets_is_zero_and_it_keeps_float64():
    real = normal(100, 8)
    assert evaluation.frechet_distance(real, real) == pytest.approx(0, abs=1e-10)
    shifted = evaluation.frechet_distance(real, real + 1e-4)
    assert shifted == pytest.approx(8e-8, rel=1e-3)


def test_frechet_distance_calls_no_collective(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a collective was called")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("torchmetrics.metric.gather_all_tensors", refuse)
    assert evaluation.frechet_distance(normal(20, 2), normal(20, 2, seed=1)) > 0


# Kernel distance


def naive_mmd(x, y):
    def kernel(a, b):
        return (float(a @ b) / len(a) + 1) ** 3

    n, m = len(x), len(y)
    xx = sum(kernel(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    yy = sum(kernel(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    xy = sum(kernel(a, b) for a in x for b in y) / (n * m)
    return xx + yy - 2 * xy


def test_kernel_distance_equals_a_naive_loop():
    real, samples = normal(15, 4), 0.5 * normal(15, 4, seed=1) + 0.3
    value = evaluation.kernel_distance(real, samples, subsets=3)
    assert value == pytest.approx(naive_mmd(real, samples), rel=1e-10)


def test_kernel_distance_of_subsets_tends_to_the_value_of_the_whole_sets():
    real, samples = normal(24, 3), normal(16, 3, seed=1) + 1
    value = evaluation.kernel_distance(real, samples, subsets=4000, subset_size=8)
    assert value == pytest.approx(naive_mmd(real, samples), rel=0.03)


def test_kernel_distance_is_unbiased():
    values = torch.tensor(
        [
            evaluation.kernel_distance(
                normal(40, 4, seed=2 * i), normal(40, 4, seed=2 * i + 1), subsets=1
            )
            for i in range(200)
        ]
    )
    standard_error = (values.std() / math.sqrt(len(values))).item()
    assert abs(values.mean().item()) < 3 * standard_error
    assert (values < 0).any(), "an unbiased estimate of zero takes both signs"
    # leaving the diagonal in adds about E[k(x, x)] 2 / n, which this could tell apart
    assert standard_error * 3 < 2 * (1 + 1) ** 3 / 40


def test_kernel_distance_is_keyed_by_its_seed():
    real, samples = normal(60, 4), normal(50, 4, seed=1)
    first, again, other = (
        evaluation.kernel_distance(real, samples, subsets=2, subset_size=20, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


# Precision, recall, density, coverage


def naive_manifold_figures(real, samples, k_precision, k_coverage):
    """The papers' definitions in plain loops."""

    def radius(points, i, k):
        others = [math.dist(points[i], points[j]) for j in range(len(points)) if j != i]
        return sorted(others)[k - 1]

    def covered(point, points, radii):
        return any(math.dist(point, q) <= r for q, r in zip(points, radii, strict=True))

    real_radii = [radius(real, i, k_precision) for i in range(len(real))]
    sample_radii = [radius(samples, i, k_precision) for i in range(len(samples))]
    precision = sum(covered(y, real, real_radii) for y in samples) / len(samples)
    recall = sum(covered(x, samples, sample_radii) for x in real) / len(real)
    radii = [radius(real, i, k_coverage) for i in range(len(real))]
    inside = [sum(math.dist(x, y) < r for y in samples) for x, r in zip(real, radii, strict=True)]
    density = sum(inside) / (k_coverage * len(samples))
    coverage = sum(count > 0 for count in inside) / len(real)
    return precision, recall, density, coverage


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "m", "k"), [(30, 20, 3), (20, 30, 5), (8, 7, 1)])
def test_manifold_figures_equal_naive_loops(n, m, k, seed):
    real, samples = normal(n, 3, seed=seed), 0.7 * normal(m, 3, seed=seed + 100) + 0.4
    expected = naive_manifold_figures(real.tolist(), samples.tolist(), k, k + 1)
    figures = (
        *evaluation.precision_recall(real, samples, k),
        *evaluation.density_coverage(real, samples, k + 1),
    )
    assert figures == pytest.approx(expected, abs=1e-12)


def test_identical_sets_have_ones_everywhere():
    real = normal(60, 4)
    assert evaluation.precision_recall(real, real.flip(0)) == (1, 1)
    assert evaluation.density_coverage(real, real.flip(0)) == pytest.approx((1, 1))


def test_disjoint_sets_have_zeros_everywhere():
    real = normal(60, 4)
    assert evaluation.precision_recall(real, real + 100) == (0, 0)
    assert evaluation.density_coverage(real, real + 100) == (0, 0)


def test_a_collapsed_set_is_precise_and_dense_without_recall_or_coverage():
    real = normal(200, 4)
    centre = real[real.norm(dim=1).argmin()]
    samples = centre + 1e-3 * normal(100, 4, seed=1)
    precision, recall = evaluation.precision_recall(real, samples)
    density, coverage = evaluation.density_coverage(real, samples)
    assert precision == 1
    assert recall <= 0.01
    assert density > 1
    assert coverage < 0.2


def test_two_far_outliers_inflate_recall_but_not_coverage():
    # the weakness of recall that coverage was made for (arXiv 2002.09797, section 3)
    real = normal(100, 2)
    outliers = torch.tensor([[50.0, 50.0], [-50.0, -50.0]]).double()
    samples = torch.cat([0.01 * real[:20], outliers])
    assert evaluation.precision_recall(real, samples)[1] > 0.9
    assert evaluation.density_coverage(real, samples)[1] < 0.5


def test_repeated_points_are_at_distance_zero_far_from_the_origin_too():
    samples = torch.full((40, 8), 1e4 / 3).double()
    real = torch.cat([samples[:1], samples[:1] + 1 + normal(39, 8)])
    assert evaluation.precision_recall(real, samples) == (1, 1 / 40)


# Classes


def test_class_figures_of_known_predictions():
    logits = torch.eye(4)[[0, 0, 1, 2]]
    labels = torch.tensor([0, 1, 1, 2])
    assert evaluation.class_accuracy(logits, labels) == 0.75
    assert evaluation.class_counts(labels, 4).tolist() == [1, 2, 1, 0]
    assert evaluation.class_balance(logits.argmax(1), labels, 4) == 0.25
    assert evaluation.class_balance(labels, labels.repeat(3), 4) == 0
    assert evaluation.class_balance(torch.zeros(5).long(), torch.ones(3).long(), 2) == 1


# Sliced Wasserstein distance


def test_sliced_distance_in_one_dimension_is_that_of_the_quantile_functions():
    real, samples = normal(6, 1), normal(4, 1, seed=1) + 0.5
    # sets of six and four become sets of twelve by repetition
    x = real.repeat_interleave(2, 0).sort(0).values
    y = samples.repeat_interleave(3, 0).sort(0).values
    expected = (x - y).square().mean().sqrt().item()
    value = evaluation.sliced_wasserstein_distance(real, samples)
    assert value == pytest.approx(expected, rel=1e-12)
    assert value >= scipy.stats.wasserstein_distance(real[:, 0], samples[:, 0])


def test_sliced_distance_of_a_translation_is_its_mean_projection():
    real = normal(50, 3)
    shift = torch.tensor([3.0, 0.0, 4.0]).double()
    value = evaluation.sliced_wasserstein_distance(real, real.flip(0) + shift, projections=20_000)
    assert value == pytest.approx(5 / math.sqrt(3), rel=0.02)


def test_sliced_distance_of_equal_sets_is_zero_and_seeds_matter():
    real, samples = normal(31, 3), normal(29, 3, seed=1)
    assert evaluation.sliced_wasserstein_distance(real, real.flip(0)) == pytest.approx(0, abs=1e-12)
    values = [
        evaluation.sliced_wasserstein_distance(real, samples, projections=4, seed=s)
        for s in (0, 0, 1)
    ]
    assert values[0] == values[1] != values[2]


# Errors

PAIRED = [
    evaluation.frechet_distance,
    evaluation.kernel_distance,
    evaluation.precision_recall,
    evaluation.density_coverage,
    evaluation.sliced_wasserstein_distance,
]


@pytest.mark.parametrize("metric", PAIRED)
def test_metrics_refuse_bad_features(metric):
    real, broken = normal(20, 4), normal(20, 4)
    broken[3, 1] = math.nan
    broken[7] = math.inf
    with pytest.raises(ValueError, match="2 of 20 samples contain NaN or inf"):
        metric(real, broken)
    with pytest.raises(ValueError, match="2 of 20 real features contain NaN or inf"):
        metric(broken, real)
    with pytest.raises(ValueError, match="real features have 4 dimensions, samples 3"):
        metric(real, real[:, :3])
    with pytest.raises(ValueError, match=r"must be \[rows, features\]"):
        metric(real, real[0])
    with pytest.raises(ValueError, match="0 samples are too few"):
        metric(real, real[:0])


@pytest.mark.parametrize(
    ("metric", "real", "samples"),
    [
        (evaluation.frechet_distance, 2, 2),
        (evaluation.kernel_distance, 2, 2),
        (evaluation.precision_recall, 4, 4),
        (evaluation.density_coverage, 6, 1),
    ],
)
def test_metrics_say_how_many_rows_they_need(metric, real, samples):
    metric(normal(real, 3), normal(samples, 3, seed=1))
    with pytest.raises(ValueError, match=f"{real - 1} real .* at least {real} are needed"):
        metric(normal(real - 1, 3), normal(20, 3))
    with pytest.raises(ValueError, match=f"{samples - 1} samples .* at least {samples} are needed"):
        metric(normal(20, 3), normal(samples - 1, 3))


# Evaluator


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture(scope="module")
def evaluator(digits):
    return evaluation.Evaluator(*digits, features.train_digit_classifier())


def test_floor_is_better_than_noise(evaluator):
    floor = evaluator.floor()
    noise = evaluator.evaluate(normal(400, 1, 8, 8).float(), torch.arange(400) % 10)
    assert floor.frechet_distance < 0.05 * noise.frechet_distance
    assert floor.kernel_distance < 0.05 * noise.kernel_distance
    assert floor.precision == 1, "each half lies in the whole"
    assert floor.recall > 0.9, "noise may have more: its balls are wide"
    assert floor.density > noise.density
    assert floor.coverage > 0.9 > noise.coverage
    assert floor.class_accuracy > 0.999 > 0.5 > noise.class_accuracy
    assert floor.class_balance < noise.class_balance


def test_floor_compares_a_seeded_half_with_the_whole(digits, evaluator):
    images, labels = digits
    half = torch.randperm(1797, generator=torch.Generator().manual_seed(5))[:898]
    # Not to the last bit: how a matrix product is cut depends on where its memory lies, and a
    # sample may change sides at the edge of a neighbourhood.
    expected = evaluator.evaluate(images[half], labels[half])
    assert evaluator.floor(5).as_dict() == pytest.approx(expected.as_dict(), rel=1e-3)
    assert evaluator.floor(6) != evaluator.floor(5)


def test_evaluation_is_deterministic_and_leaves_the_global_generator_alone(digits, evaluator):
    images, labels = digits
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = evaluator.evaluate(images[:300], labels[:300])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert evaluator.evaluate(images[:300], labels[:300]) == first


def test_figures_are_those_of_the_functions_on_the_features(digits, evaluator):
    images, labels = digits
    network = features.train_digit_classifier()
    samples, asked = 0.9 * images[:100], labels[1:101]
    real, fake = network.features(images), network.features(samples)
    predicted = network.classify(samples).argmax(1)
    assert evaluator.evaluate(samples, asked) == evaluation.SampleMetrics(
        evaluation.frechet_distance(real, fake),
        evaluation.kernel_distance(real, fake),
        *evaluation.precision_recall(real, fake),
        *evaluation.density_coverage(real, fake),
        (predicted == asked).double().mean().item(),
        evaluation.class_balance(predicted, asked, 10),
    )


def test_without_labels_the_balance_is_against_the_real_labels(digits, evaluator):
    images, labels = digits
    zeros = images[labels == 0]
    figures = evaluator.evaluate(zeros)
    assert figures.class_accuracy is None
    assert figures.class_balance == pytest.approx(1 - (labels == 0).double().mean().item())


def test_real_features_are_computed_once(digits):
    calls = []

    class Counting:
        def features(self, images):
            calls.append(len(images))
            return images.flatten(1)

    evaluator = evaluation.Evaluator(digits[0][:50], None, Counting())
    evaluator.evaluate(digits[0][50:70])
    evaluator.floor()
    assert calls == [50, 20]


def test_without_a_classifier_there_are_no_class_figures(digits):
    images, labels = digits
    evaluator = evaluation.Evaluator(images[:50], labels[:50], features.RawFeatures())
    for figures in (evaluator.evaluate(images[50:90], labels[50:90]), evaluator.floor()):
        assert figures.class_accuracy is None
        assert figures.class_balance is None


def test_a_classifier_without_any_labels_gives_no_class_figures(digits):
    images, _ = digits
    evaluator = evaluation.Evaluator(images[:50], None, features.train_digit_classifier())
    assert evaluator.evaluate(images[50:90]).class_balance is None
    assert evaluator.floor().class_balance is None


def test_evaluator_refuses_bad_samples_and_labels(digits, evaluator):
    images, labels = digits
    broken = images[:10].clone()
    broken[[2, 5, 6], 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="3 of 10 images contain NaN"):
        evaluator.evaluate(broken)
    with pytest.raises(ValueError, match="3 images are too few: at least 4"):
        evaluator.evaluate(images[:3])
    with pytest.raises(ValueError, match="5 images are too few: at least 6"):
        evaluation.Evaluator(images[:5], None, features.RawFeatures())
    with pytest.raises(ValueError, match=r"int64 labels \[10\], got torch.int64 \(9,\)"):
        evaluator.evaluate(images[:10], labels[:9])
    with pytest.raises(ValueError, match=r"int64 labels \[10\], got torch.float32"):
        evaluator.evaluate(images[:10], labels[:10].float())
    with pytest.raises(ValueError, match=r"7 of 10 labels are not in 0\.\.9"):
        evaluator.evaluate(images[:10], labels[:10] + 7)
    raw = evaluation.Evaluator(images[:20], None, features.RawFeatures())
    with pytest.raises(ValueError, match="real features have 64 dimensions, samples 16"):
        raw.evaluate(images[:10, :, :4, :4])


def test_every_figure_that_names_a_best_student_has_a_direction():
    # One that is in neither would keep the worst.
    annotation = ValidationSettings.model_fields["metric"].annotation
    metrics = [name for part in get_args(annotation) for name in get_args(part)]
    assert {*LOWER_IS_BETTER, *evaluation.HIGHER_IS_BETTER} >= {*metrics}
    assert "clip_score" in metrics
    assert "clip_score" in evaluation.HIGHER_IS_BETTER


def test_colours_are_means_over_a_grid():
    images = torch.rand(3, 2, 24, 16, generator=torch.Generator().manual_seed(0))
    found = features.ColourFeatures().features(images)
    expected = images.reshape(3, 2, 8, 3, 8, 2).mean((3, 5)).flatten(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("size", "kind"), [(16, features.RawFeatures), (40, features.ColourFeatures)]
)
def test_large_pictures_are_compared_by_their_colours(size, kind):
    images = Dataset(torch.rand(20, 3, size, size))
    evaluator = build_evaluator(images, None, "auto", "custom")
    assert isinstance(evaluator._network, kind)
    assert evaluator.evaluate(images.samples).frechet_distance < 1e-6


def test_raw_numbers_of_large_pictures_are_refused():
    images = Dataset(torch.rand(20, 3, 40, 40))
    with pytest.raises(UserError, match="samples have 4,800 numbers; at most 4,096"):
        build_evaluator(images, None, "raw", "custom")
