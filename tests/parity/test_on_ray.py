"""On Ray, in one group or in several, a recipe gives what it gives under torchrun, bit for bit."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cases import Case, Odd, largest_difference, make_recipe, rest_of, train
from ray import cloudpickle
from safetensors.torch import load_file
from torch import Tensor

from fewstep.build import build_worker
from fewstep.diffusion.draw import Draw
from fewstep.models.module import ModuleModel
from fewstep.pretrained import load_weights
from fewstep.training.cycle import plan_cycle

# The cluster's processes cannot import it.
cloudpickle.register_pickle_by_value(cases)
GROUPS = {"critic": ["fake_score", "teacher_score"], "actor": ["student", "student_ema"]}
SPLIT = {"placement.groups": GROUPS}
JUDGED = {**GROUPS, "critic": ["fake_score", "teacher_score", "discriminator"]}
FAKE_FIRST = {"cycle.order": "fake_score_first"}
SHARED = {"storage": "shared_base"}
FOUR = {"train.cycles": 4}
# A network that needs neither diffusers nor PEFT, which take seconds to import in every process.
OPTIMIZER = {"lr": 0.01, "weight_decay": 0.1, "unused_parameters": ["dead"]}
ODD = {
    "model": {"family": "module"},
    "method.guidance": 1.0,
    "optimizers": {"student": OPTIMIZER, "fake_score": OPTIMIZER},
}
# Recipe, and what is said of the cluster.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    name: (Case(name, {**FOUR, **changes}, method, odd="model" in changes), cluster)
    for name, method, changes, cluster in (
        ("one-group", "dmd2", {**SHARED, "parallel.kind": "fsdp2"}, {}),
        ("data", "flow_matching", {"parallel.kind": "fsdp1"}, {}),
        (
            "rollouts",
            "dmd2",
            {**ODD, "parallel.kind": "ddp", "train.micro_batch_size": 2},
            {"rollout.workers": 1},
        ),
        (
            "independent",
            "dmd2",
            {**ODD, **FAKE_FIRST, "parallel.kind": "fsdp2", "train.micro_batch_size": 1},
            {**SPLIT, "rollout.workers": 1},
        ),
        (
            "shared",
            "dmd2",
            {
                **FAKE_FIRST,
                **SHARED,
                "parallel.kind": "fsdp2",
                "method.score_batching": "fused",
                "runtime.activation_checkpointing": True,
                "method.fake_updates_per_student": 2,
            },
            {**SPLIT, "placement.offload": True, "rollout.workers": 1, "rollout.bucket_mib": 1},
        ),
        (
            "adversarial",
            "adversarial",
            {
                "model": {"family": "module"},
                "optimizers": {**ODD["optimizers"], "discriminator": {"lr": 0.01}},
                **FAKE_FIRST,
                "parallel.kind": "fsdp2",
                "train.micro_batch_size": 2,
            },
            {"placement.groups": JUDGED, "placement.offload": True, "rollout.workers": 1},
        ),
        (
            "reuse",
            "dmd2",
            {**ODD, **FAKE_FIRST, "parallel.kind": "fsdp1", "cycle.fake_batches": "reuse_student"},
            {**SPLIT, "placement.offload": True, "rollout.workers": 3},
        ),
    )
}
# Nothing in them that is in none of the others.
ALSO = ("one-group", "data", "reuse")
ON_RAY = {"launch.kind": "ray", "launch.processes": 2}


def on_ray(case: Case, cluster: dict[str, Any], **what: Any) -> Case:
    """The same recipe on the cluster."""
    changes = {**case.changes, **ON_RAY, **cluster}
    return replace(case, changes=changes, **what)


@pytest.fixture(scope="module")
def launched(launch: Any) -> Path:
    """Every case under torchrun."""
    return launch(2, [case for case, _ in CASES.values()])


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Equal to the bit, but for samples: they were made in portions of another size."""
    assert expected.keys() == found.keys()
    for key in expected:
        if key != "samples":
            assert torch.equal(expected[key], found[key]), key
    assert largest_difference(expected, found, "samples")[0] < 1e-12


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in ALSO else ()) for name in CASES],
)
def test_the_same_bits_as_under_torchrun(
    launched: Path, nothing_left: Any, tmp_path: Path, name: str
) -> None:
    case, cluster = CASES[name]
    found = train(on_ray(case, cluster), tmp_path)
    assert len(found["losses"]) > 4 or name == "data"
    assert_same(load_file(launched / f"{name}.result"), found)


# A run that is stopped and gone on with, in the same groups or in others.


@pytest.fixture(scope="module")
def stopped(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of four cycles in two groups, saved in the background."""
    directory = tmp_path_factory.mktemp("stopped")
    case, groups = CASES["independent"]
    groups = {**groups, "checkpoint.asynchronous": True}
    train(on_ray(case, groups, stop_after=2), directory)
    return directory / case.name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_and_two_cycles_in_two_groups_are_four_bit_for_bit(
    launched: Path, stopped: Path, nothing_left: Any, tmp_path: Path
) -> None:
    case, groups = CASES["independent"]
    shutil.copytree(stopped, tmp_path / case.name)
    found = train(on_ray(case, groups, resume="here"), tmp_path)
    expected = load_file(launched / f"{case.name}.result")
    assert 0 < len(found["losses"]) < len(expected["losses"])
    assert_same(rest_of(expected, found), found)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_in_two_groups_is_gone_on_with_by_one_process(
    launched: Path, stopped: Path, tmp_path: Path
) -> None:
    case, _ = CASES["independent"]
    shutil.copytree(stopped, tmp_path / case.name)
    alone = {**case.changes, "parallel.kind": "none"}
    found = train(replace(case, changes=alone, resume="here"), tmp_path)
    assert_close(load_file(launched / f"{case.name}.result"), found)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_run_of_one_process_is_gone_on_with_in_two_groups(
    launched: Path, nothing_left: Any, tmp_path: Path
) -> None:
    case, groups = CASES["independent"]
    alone = {**case.changes, "parallel.kind": "none"}
    train(replace(case, changes=alone, stop_after=2), tmp_path)
    found = train(on_ray(case, groups, resume="here"), tmp_path)
    assert_close(load_file(launched / f"{case.name}.result"), found)


def assert_close(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert torch.equal(expected["counters"], found["counters"])
    expected = rest_of(expected, found)
    for part in ("losses", "networks", "samples"):
        difference, where = largest_difference(expected, found, part)
        assert difference < 1e-9, where


# Samples of a student that is one cycle older.

AHEAD = {**ODD, **FAKE_FIRST, "train.cycles": 5, "rollout.schedule": "async"}
ON_AHEAD = Case("ahead", {**AHEAD, **ON_RAY, **SPLIT, "launch.processes": 1}, odd=True)


def train_behind(directory: Path) -> dict[str, Tensor]:
    """The losses and the state of a run whose fake score learns from older samples.

    Written out: the samples of each fake_score phase are those of the student as it was when the
    cycle before began; the student's own phase is as ever.
    """
    recipe = make_recipe(directory, {k: v for k, v in AHEAD.items() if k != "rollout.schedule"})
    model = ModuleModel(Odd, (2,))
    now = build_worker(recipe, model, None, load_weights(recipe, model))
    old = build_worker(recipe, model, None, load_weights(recipe, model), roles=("student",))
    method, losses = now.method, []
    remembered = copy.deepcopy(now.roles.storage.networks["student"].state_dict())
    for cycle in range(1, 6):
        old.roles.storage.networks["student"].load_state_dict(remembered)
        remembered = copy.deepcopy(now.roles.storage.networks["student"].state_dict())
        for request in plan_cycle(cycle, method.fake_updates_per_student, recipe.cycle):
            if request.role == "fake_score":
                draw = Draw(recipe.seed, cycle, request.rollout)
                batch = now.batches.batch(draw, recipe.train.batch_size)
                with torch.no_grad():
                    x0 = method.generate(old.roles, method.simulate(old.roles, batch, draw))
                request = replace(request, external={"x0": x0})
            losses.append(now.run_phase(request).metrics["loss"])
    tensors = now.roles.storage.tensors
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        **{f"networks/{n}/{k}": v for n, held in tensors.items() for k, v in held.items()},
    }


@pytest.fixture(scope="module")
def ahead(
    cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """A run with samples made ahead: its directory, and what `train` gives of it."""
    directory = tmp_path_factory.mktemp("ahead")
    return directory / ON_AHEAD.name, train(ON_AHEAD, directory)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_samples_made_ahead_are_those_of_the_student_a_cycle_ago(
    ahead: tuple[Path, dict[str, Tensor]], nothing_left: Any, tmp_path: Path
) -> None:
    run_dir, found = ahead
    expected = train_behind(tmp_path / "behind")
    for part in ("losses", "networks"):
        chosen = {k: v for k, v in found.items() if k.startswith(part)}
        reference = {k: v for k, v in expected.items() if k.startswith(part)}
        difference, where = largest_difference(reference, chosen)
        assert difference < 1e-9, where
    entries = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    behind = [entry["staleness"] for entry in entries if entry["series"] == "fake_score"]
    assert behind == [0, 0, 1, 1, 1]  # the student is not trained in the first cycle
    # And it makes a difference: samples of the student as it is would give another fake score.
    sync = {**AHEAD, "rollout.schedule": "sync"}
    plain = train(Case("plain", sync, odd=True), tmp_path)
    assert largest_difference(plain, found, "losses")[0] > 1e-6


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_samples_in_flight_are_not_lost_by_an_end(
    ahead: tuple[Path, dict[str, Tensor]], nothing_left: Any, tmp_path: Path
) -> None:
    _, found = ahead
    train(replace(ON_AHEAD, name="again", stop_after=3), tmp_path)
    assert list((tmp_path / "again").glob("checkpoints/cycle_000003/rollouts.safetensors"))
    again = train(replace(ON_AHEAD, name="again", resume="here"), tmp_path)
    assert_same(rest_of(found, again), again)

    # Nor by an end that turned out not to be one.
    short = replace(ON_AHEAD, name="short", changes={**ON_AHEAD.changes, "train.cycles": 3})
    train(short, tmp_path)
    longer = train(replace(ON_AHEAD, name="short", resume="here"), tmp_path)
    assert_same(rest_of(found, longer), longer)
