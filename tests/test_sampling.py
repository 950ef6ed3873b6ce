"""From a role to samples: the trained grid, counted calls, keyed noise."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fewstep
from fewstep.data.conditions import (
    Conditions,
    label_conditions,
    no_conditions,
    tensor_conditions,
)
from fewstep.methods.method import SamplerSpec
from fewstep.models.dit import DiT
from fewstep.models.module import ModuleModel
from fewstep.sampling import sample_role, samples_at_once

NETWORK = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 8, "patch_size": 4}


@pytest.fixture
def run(tmp_path: Path) -> fewstep.Run:
    """Two cycles of a four-step student at shift 5, with validation."""
    optimizer = {"lr": 1e-2}
    return fewstep.train(
        fewstep.parse_recipe(
            {
                "run_dir": str(tmp_path / "run"),
                "model": {"family": "dit", "network": NETWORK},
                "data": {"name": "digits"},
                "method": {
                    "name": "dmd2",
                    "steps": 4,
                    "shift": 5.0,
                    "fake_updates_per_student": 1,
                },
                "optimizers": {"student": optimizer, "fake_score": optimizer},
                "train": {"cycles": 2, "batch_size": 4},
                "validation": {"every": 2, "samples": 16},
                "logging": {"teacher_samples": 2, "tensorboard": False},
            }
        )
    )


@pytest.fixture
def timesteps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timestep of every network call, as the network is told it."""
    seen: list[float] = []
    forward = DiT.forward

    def spy(self: DiT, network: object, x: Tensor, sigma: Tensor, condition: object) -> Tensor:
        seen.append(float(self.path.timestep(sigma)[0]))
        return forward(self, network, x, sigma, condition)

    monkeypatch.setattr(DiT, "forward", spy)
    return seen


TRAINED = [1000.0, 937.5, 833.33, 625.0]


def test_sampling_calls_the_network_at_exactly_the_trained_timesteps(
    run: fewstep.Run, timesteps: list[float]
) -> None:
    samples = run.sample(8)
    assert timesteps == pytest.approx(TRAINED, abs=0.01)
    assert samples.network_calls == run.method.sampler().nfe == 4


def test_validation_uses_the_trained_grid_and_no_training_phase(
    run: fewstep.Run, timesteps: list[float], tmp_path: Path
) -> None:
    recipe = run.recipe.model_copy(
        update={
            "run_dir": str(tmp_path / "again"),
            "train": run.recipe.train.model_copy(update={"cycles": 1}),
        }
    )
    spied: list[int] = []
    fewstep.train(recipe, on_cycle=lambda cycle, results: spied.append(len(timesteps)))
    # The callback comes right after validation, which made the last four calls before it.
    assert timesteps[spied[0] - 4 : spied[0]] == pytest.approx(TRAINED, abs=0.01)


def test_the_stored_recipe_holds_the_grid_itself(run: fewstep.Run) -> None:
    stored = fewstep.load_recipe(run.directory / "recipe.yaml")
    assert [1000 * sigma for sigma in stored.method.sigmas] == pytest.approx(TRAINED, abs=0.01)
    assert stored.method.sigmas == run.method.sampler().sigmas


def test_a_sample_depends_on_its_place_and_label_alone(run: fewstep.Run) -> None:
    labels = torch.tensor([3, 1, 4, 1, 5, 9])
    conditions = label_conditions(labels)
    spec = run.method.sampler()
    whole = sample_role(run.roles, "student", spec, conditions, seed=2).images
    parts = sample_role(run.roles, "student", spec, conditions, seed=2, batch_size=2).images
    fewer = sample_role(run.roles, "student", spec, label_conditions(labels[:3]), seed=2).images
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-6)
    torch.testing.assert_close(whole[:3], fewer, rtol=0, atol=1e-6)
    other = sample_role(run.roles, "student", spec, conditions, seed=3).images
    assert (whole - other).abs().max() > 1e-3


def test_all_solvers_start_from_the_same_noise(run: fewstep.Run) -> None:
    # One Euler, Heun or renoise step from sigma 1 is the same prediction.
    four = label_conditions(torch.arange(4))
    one = [
        sample_role(run.roles, "student", SamplerSpec((1.0,), solver), four).images
        for solver in ("euler", "heun", "renoise")
    ]
    assert torch.equal(one[0], one[1])
    assert torch.equal(one[0], one[2])


@pytest.mark.parametrize(
    ("solver", "guidance", "calls"), [("euler", 1.0, 3), ("euler", 2.0, 6), ("heun", 1.0, 5)]
)
def test_network_calls_are_counted_as_they_are_made(
    run: fewstep.Run, timesteps: list[float], solver: str, guidance: float, calls: int
) -> None:
    spec = SamplerSpec((1.0, 0.7, 0.3), solver, guidance)
    made = sample_role(run.roles, "student", spec, label_conditions(torch.arange(4)))
    assert made.network_calls == len(timesteps) == spec.nfe == calls


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (no_conditions(3), "3 class labels are needed"),
        (label_conditions(torch.tensor([1, 2, 10])), r"class labels must be in 0\.\.9"),
        (tensor_conditions({}, ["a", "b", "c"]), "takes no prompts"),
    ],
)
def test_conditions_that_do_not_fit_are_refused(
    run: fewstep.Run, conditions: Conditions, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample_role(run.roles, "student", run.method.sampler(), conditions)


def test_a_count_that_contradicts_the_classes_is_refused(run: fewstep.Run) -> None:
    with pytest.raises(ValueError, match="3 samples are asked for, but 2 classes"):
        run.sample(3, classes=[1, 2])


@pytest.mark.parametrize(
    ("shape", "count"),
    [((2,), 256), ((1, 8, 8), 256), ((3, 64, 64), 85), ((16, 64, 64), 16), ((16, 128, 128), 4)],
)
def test_large_samples_are_made_a_few_at_a_time(shape: tuple[int, ...], count: int) -> None:
    assert samples_at_once(ModuleModel(torch.nn.Identity, shape)) == count
    assert samples_at_once(ModuleModel(torch.nn.Identity, (2**20 + 1,))) == 1


def test_samples_do_not_depend_on_how_many_are_made_at_once(
    run: fewstep.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    forward = DiT.forward

    def spy(self: DiT, network: object, x: Tensor, sigma: Tensor, condition: object) -> Tensor:
        sizes.append(len(x))
        return forward(self, network, x, sigma, condition)

    expected = run.sample(7).images
    monkeypatch.setattr(DiT, "forward", spy)
    monkeypatch.setattr("fewstep.sampling.NUMBERS_AT_ONCE", 3 * 64)
    assert torch.allclose(run.sample(7).images, expected, atol=1e-6)
    assert sizes == 4 * [3] + 4 * [3] + 4 * [1]
