"""Distribution matching against a teacher that is known exactly, through the real engine."""

import json
import math
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor

from fewstep.build import build_worker
from fewstep.config import load_recipe
from fewstep.evaluation import sliced_wasserstein_distance
from fewstep.launch.local import train
from fewstep.models.mixture import Mixture
from fewstep.models.model import pretrained
from fewstep.roles.role import STUDENT, STUDENT_EMA
from fewstep.run import Run

RECIPE = Path(__file__).parents[2] / "recipes" / "mixture" / "dmd2.yaml"
COUNT = 4000


def points(run: Run, role: str) -> Tensor:
    return run.sample(COUNT, role=role, seed=3).images.double()


def real(model: Mixture, seed: int) -> Tensor:
    return model.sample_data(COUNT, torch.Generator().manual_seed(seed))


def distance_to(sets: list[Tensor], samples: Tensor) -> float:
    return mean(sliced_wasserstein_distance(reference, samples) for reference in sets[:5])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wrong_student_becomes_the_mixture(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, [f"run_dir={tmp_path / 'run'}"])
    model = recipe.model.build()
    assert isinstance(model, Mixture)
    untrained = Run(
        tmp_path, recipe, build_worker(recipe, model, None, pretrained(model.build_network())), 0
    )
    # Two sets of real samples differ too, most in how many fall to each component.
    sets = [real(model, seed) for seed in range(20)]
    floor = mean(map(sliced_wasserstein_distance, sets[::2], sets[1::2]))
    assert distance_to(sets, points(untrained, STUDENT)) > 8 * floor

    run = train(recipe)
    assert run.complete
    assert run.result_role == STUDENT_EMA
    assert run.roles[STUDENT].successful == recipe.train.cycles
    assert run.method.sampler().nfe == 1
    for role in (STUDENT, STUDENT_EMA):
        samples = points(run, role)
        assert distance_to(sets, samples) < 3 * floor, role  # measured: about 2 times
        distance, nearest = torch.cdist(samples, model.means).min(1)
        share = torch.bincount(nearest, minlength=8) / COUNT
        assert share.min() > 0.5 / 8, role
        assert share.max() < 1.6 / 8, role
        # One step is a continuous map: some points must lie between the components.
        assert (distance < 3 * model.std).double().mean() > 0.7, role
        assert (distance < 4 * model.std).double().mean() > 0.85, role


@pytest.mark.parametrize(
    ("path", "kind", "least"),
    [
        ("variance_preserving", "eps", 0.02),
        ("variance_preserving", "v", 0.02),
        # EDM's noise is 80 * sigma^7: below 0.3 it drowns in rounding.
        ("edm", "x0", 0.3),
        ("edm", "velocity", 0.3),
    ],
)
def test_one_step_runs_on_other_paths_have_finite_losses(
    tmp_path: Path, path: str, kind: str, least: float
) -> None:
    run_dir = tmp_path / "run"
    recipe = load_recipe(
        RECIPE,
        [
            f"run_dir={run_dir}",
            f"model.path={path}",
            f"model.prediction={kind}",
            f"method.score_sigmas.minimum={least}",
            "train.cycles=5",
            "train.batch_size=32",
        ],
    )
    losses: list[float] = []
    run = train(
        recipe, on_cycle=lambda cycle, results: losses.extend(r.metrics["loss"] for r in results)
    )
    assert len(losses) == 15
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert {name: run.roles[name].skipped for name in run.roles} == dict.fromkeys(run.roles, 0)
    assert points(run, STUDENT_EMA).isfinite().all()


def test_four_steps_train_every_step(tmp_path: Path) -> None:
    """Over some cycles the exit step visits the whole grid, and the losses are logged."""
    overrides = [
        f"run_dir={tmp_path / 'run'}",
        "method.steps=4",
        "method.shift=3",
        "train.cycles=20",
        "train.batch_size=16",
    ]
    run = train(load_recipe(RECIPE, overrides))
    assert run.method.sampler().sigmas == pytest.approx([1, 0.9, 0.75, 0.5])
    assert run.sample(8).network_calls == 4
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    series = [json.loads(line)["series"] for line in lines]
    assert {STUDENT, "fake_score"} <= set(series)
