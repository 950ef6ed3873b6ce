"""Whole runs in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewstep.build import build_worker, seeded
from fewstep.checkpoint import complete_checkpoints
from fewstep.config import dump_recipe, load_recipe
from fewstep.data.dataset import Dataset
from fewstep.diffusion.paths import RectifiedFlow
from fewstep.errors import TrainingError, UserError
from fewstep.launch.local import train
from fewstep.methods.dmd2 import DMD2
from fewstep.models.mixture import MixtureNetwork, PointNetwork
from fewstep.models.module import ModuleModel
from fewstep.pretrained import load_weights, resolve_recipe
from fewstep.run import open_run
from fewstep.training.loop import StopRequest

pytestmark = pytest.mark.usefixtures("no_sync")

MIXTURE = {"family": "mixture", "width": 8, "depth": 1}
UNGUIDED = {"model": MIXTURE, "method.guidance": 1.0}


def test_a_run_writes_its_recipe_metrics_and_checkpoints(make_recipe) -> None:
    recipe = make_recipe("dmd2", {"logging.tensorboard": True})
    seen: list[tuple[int, int]] = []
    run = train(recipe, on_cycle=lambda cycle, results: seen.append((cycle, len(results))))
    assert seen == [(n, 3) for n in (1, 2, 3, 4)]
    assert run.complete
    assert run.cycles_run == 4
    directory = Path(recipe.run_dir)
    saved = load_recipe(directory / "recipe.yaml")
    assert saved == resolve_recipe(recipe)
    assert saved.method.sigmas == recipe.method.grid
    assert [p.name for p in complete_checkpoints(directory)] == ["cycle_000002", "cycle_000004"]
    lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    assert {entry["series"] for entry in lines} >= {"student", "fake_score", "run", "reference"}
    assert list((directory / "tensorboard").glob("events.out.tfevents.*"))
    roles = run.roles
    assert (roles["student"].successful, roles["fake_score"].successful) == (4, 8)
    assert roles.ema_updates == 4


@pytest.mark.parametrize("method", ["dmd2", "flow_matching"])
def test_results_do_not_depend_on_global_generators(
    make_recipe, tmp_path, ten_images, flat_state, assert_equal_states, storage, method
) -> None:
    states = []
    data = ten_images if method == "flow_matching" else None
    for seed in (1, 2):
        torch.manual_seed(seed)
        changes = {"run_dir": str(tmp_path / str(seed)), "storage": storage}
        before = torch.get_rng_state()
        run = train(
            make_recipe(method, changes),
            data=data,
            on_cycle=lambda cycle, results: None,
        )
        # Nor are they advanced.
        assert torch.equal(torch.get_rng_state(), before)
        states.append(flat_state(run))
    assert_equal_states(*states)


def test_results_depend_on_the_recipes_seed(make_recipe, tmp_path, flat_state) -> None:
    states = [
        flat_state(train(make_recipe("dmd2", {"seed": s, "run_dir": str(tmp_path / str(s))})))
        for s in (1, 2)
    ]
    key = "/networks/student/proj_out_2.weight"
    assert not torch.equal(states[0][key], states[1][key])


def test_drawing_from_the_global_generator_between_cycles_changes_nothing(
    make_recipe, tmp_path, flat_state, assert_equal_states
) -> None:
    states = []
    for count in (0, 7):
        recipe = make_recipe("dmd2", {"run_dir": str(tmp_path / str(count))})
        run = train(recipe, on_cycle=lambda cycle, results, n=count: torch.rand(n))
        states.append(flat_state(run))
    assert_equal_states(*states)


def test_the_teacher_and_the_base_never_change(make_recipe, storage) -> None:
    recipe = make_recipe("dmd2", {"storage": storage})
    teacher = load_weights(recipe, recipe.model.build()).weights
    run = train(recipe)
    plain = run.roles.storage.plain_network("teacher_score").state_dict()
    assert plain.keys() == teacher.keys()
    assert all(torch.equal(plain[key], teacher[key]) for key in teacher)


def test_seeded_keys_and_restores_the_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with seeded(5, "network"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    for seed, purpose, same in ((5, "network", True), (6, "network", False), (5, "x", False)):
        with seeded(seed, purpose):
            assert torch.equal(torch.rand(3), first) == same


# From a teacher to a student.


@pytest.fixture
def teacher_run(make_recipe, ten_images, tmp_path) -> Path:
    directory = tmp_path / "teacher"
    train(
        make_recipe("flow_matching", {"run_dir": str(directory), "train.cycles": 2}),
        data=ten_images,
    )
    return directory


def test_a_student_starts_from_the_averaged_network_of_a_run(
    make_recipe, teacher_run, storage
) -> None:
    changes = {"model": {"family": "dit", "weights": str(teacher_run)}, "storage": storage}
    run = train(make_recipe("dmd2", changes))
    expected = open_run(teacher_run).roles.storage.plain_network("student_ema").state_dict()
    plain = run.roles.storage.plain_network("teacher_score").state_dict()
    assert all(torch.equal(plain[key], expected[key]) for key in expected)
    # The size of the network is in the run's own recipe.
    saved = load_recipe(run.directory / "recipe.yaml")
    assert saved.model.network == load_recipe(teacher_run / "recipe.yaml").model.network
    assert open_run(run.directory).cycle == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model.prediction": "v"}, r"model\.prediction is 'v', but .* trained with 'velocity'"),
        ({"model.timestep_scale": 1.0}, r"model\.timestep_scale is 1\.0, but .*1000\.0"),
        ({"model.network": {"num_layers": 3}}, r"model\.network is .*, but"),
    ],
)
def test_a_student_that_contradicts_its_teacher_is_refused(
    make_recipe, teacher_run, changes, text
) -> None:
    model = {"model": {"family": "dit", "weights": str(teacher_run)}}
    with pytest.raises(UserError, match=text):
        train(make_recipe("dmd2", {**model, **changes}))


def test_a_student_that_repeats_its_teachers_settings_is_fine(make_recipe, teacher_run) -> None:
    network = dict(load_recipe(teacher_run / "recipe.yaml").model.network)
    network.pop("in_channels")  # the default, which need not be repeated
    model = {"family": "dit", "weights": str(teacher_run), "network": network}
    assert train(make_recipe("dmd2", {"model": model, "train.cycles": 1})).complete


def test_weights_of_another_family_are_refused(make_recipe, tmp_path) -> None:
    train(make_recipe("dmd2", {**UNGUIDED, "run_dir": str(tmp_path / "points")}))
    model = {"family": "dit", "weights": str(tmp_path / "points")}
    with pytest.raises(UserError, match=r"model\.family is 'dit'"):
        train(make_recipe("dmd2", {"model": model}))


def test_a_teacher_run_without_a_checkpoint_is_refused(make_recipe, tmp_path) -> None:
    recipe = make_recipe("flow_matching", {"run_dir": str(tmp_path / "teacher")})
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "recipe.yaml").write_text(dump_recipe(recipe))
    model = {"family": "dit", "weights": str(tmp_path / "teacher")}
    with pytest.raises(UserError, match=r"model\.weights: .* no complete checkpoint"):
        train(make_recipe("dmd2", {"model": model}))


def test_a_network_of_ones_own(make_recipe, flat_state, assert_equal_states, fewstep) -> None:
    model = ModuleModel(lambda: PointNetwork(2, 8, 1), (2,))
    changes = {
        "model": {"family": "module"},
        "method.guidance": 1.0,
        "storage": "shared_base",
        "lora.targets": ["layers.0", "layers.2"],
    }
    run = train(make_recipe("dmd2", changes), model=model)
    assert run.complete
    opened = open_run(run.directory, model=model)
    assert_equal_states(flat_state(opened), flat_state(run))
    with pytest.raises(UserError, match=r"model\.family: 'module' is a network given from Python"):
        open_run(run.directory)
    code, out, _ = fewstep("inspect", run.directory)
    assert code == 0
    updates = out[out.index("Updates") :]
    assert re.search(r"fake_score +│ +8 +│ +8 +│ +0 ", updates)
    assert "cycle_000004" in updates


# Refused before anything is loaded.


@pytest.fixture
def nothing_is_loaded(monkeypatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("fewstep.launch.local.load_weights", refuse)
    monkeypatch.setattr("fewstep.launch.local.build_worker", refuse)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        ("dmd2", {"model": MIXTURE}, r"method\.guidance is 2\.0, but the teacher is unconditional"),
        ("dmd2", {"model.guidance_distilled": True}, r"method\.guidance is 2\.0, but model\.guid"),
        (
            "flow_matching",
            {"model.guidance_distilled": True, "method.sampling.guidance": 3.0},
            r"method\.sampling\.guidance is 3\.0, but model\.guidance_distilled is true",
        ),
        ("dmd2", {"model.prediction": "eps"}, r"model\.prediction is 'eps'.*start the grid lower"),
        ("flow_matching", {}, "the recipe needs a data set"),
        ("dmd2", {"validation": {"every": 1}}, "the recipe needs a data set"),
        (
            "flow_matching",
            {"model.prediction": "eps"},
            r"model\.prediction is 'eps'.*the sampler's first sigma = 1\.0",
        ),
        ("dmd2", {"runtime.device": "cuda:77"}, r"runtime\.device: 'cuda:77'"),
        ("dmd2", {"model": {"family": "dit", "weights": "/no/where"}}, r"model\.weights: /no/wh"),
        ("dmd2", {"model": {"family": "module"}}, "is a network given from Python"),
    ],
)
def test_what_cannot_work_is_refused_before_any_weight_is_loaded(
    make_recipe, method, changes, text
) -> None:
    recipe = make_recipe(method, changes)
    with pytest.raises(UserError, match=text):
        train(recipe)
    assert not Path(recipe.run_dir).exists()


def test_guidance_distilled_and_unconditional_teachers_train_without_guidance(
    make_recipe, tmp_path
) -> None:
    for name, changes in (
        ("distilled", {"model.guidance_distilled": True, "method.guidance": 1.0}),
        ("points", UNGUIDED),
    ):
        assert train(make_recipe("dmd2", {**changes, "run_dir": str(tmp_path / name)})).complete


@pytest.mark.parametrize("path", ["rectified_flow", "variance_preserving", "edm"])
def test_an_eps_teacher_trains_from_below_pure_noise(make_recipe, path) -> None:
    model = {**MIXTURE, "prediction": "eps", "path": path}
    changes = {**UNGUIDED, "model": model, "method.sigmas": [0.9, 0.4]}
    if path == "edm":
        # Its noise is 80 * sigma^7: the default minimum would be far below rounding.
        with pytest.raises(UserError, match=r"method\.score_sigmas\.minimum: 0\.02 is a noise of"):
            train(make_recipe("dmd2", changes))
        changes["method.score_sigmas"] = {"minimum": 0.3, "maximum": 0.98}
    assert train(make_recipe("dmd2", changes)).complete


@pytest.mark.parametrize(
    ("samples", "labels", "text"),
    [
        (torch.zeros(9, 1, 5, 5), torch.zeros(9, dtype=torch.int64), "shape"),
        (torch.zeros(9, 1, 4, 4), torch.full((9,), 3), "label 3 is too high for 3 classes"),
        (torch.zeros(9, 1, 4, 4), None, "labels are needed"),
    ],
)
def test_data_that_do_not_fit_the_network_are_refused(make_recipe, samples, labels, text) -> None:
    recipe = make_recipe("flow_matching")
    with pytest.raises(UserError, match=text):
        train(recipe, data=Dataset(samples, labels))
    assert not Path(recipe.run_dir).exists()


class Misshapen(torch.nn.Linear):
    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: Misshapen(2, 3),
            r"model: the network returns shape \(2, 3\), its input has \(2, 2",
        ),
        (lambda: Misshapen(5, 2), "model: the network cannot be called: mat1 and mat2 shapes"),
        (lambda: Misshapen(2, 10**16), "model: the network cannot be built: "),
    ],
)
def test_a_network_that_cannot_work_is_refused(make_recipe, build, text) -> None:
    recipe = make_recipe("dmd2", {"model": {"family": "module"}, "method.guidance": 1.0})
    with pytest.raises(UserError, match=text) as error:
        train(recipe, model=ModuleModel(build, (2,)))
    assert len(str(error.value).splitlines()) == 1
    assert not Path(recipe.run_dir).exists()


@pytest.mark.parametrize(
    "part", ["local.teacher_statistics", "local.build_judge", "directory.open_metrics"]
)
@pytest.mark.parametrize("failure", [UserError, KeyboardInterrupt])
def test_what_fails_before_the_first_cycle_leaves_no_run(
    make_recipe, ten_images, monkeypatch, part, failure
) -> None:
    def fail(*args: Any) -> None:
        raise failure("not now")

    recipe = make_recipe("dmd2", {"validation": {"every": 1, "samples": 16}, "data.name": "custom"})
    with monkeypatch.context() as patch:
        patch.setattr(f"fewstep.launch.{part}", fail)
        with pytest.raises(failure, match="not now"):
            train(recipe, data=ten_images)
    assert not (Path(recipe.run_dir) / "recipe.yaml").exists()
    assert train(recipe, data=ten_images).complete


@pytest.mark.parametrize("below", ["", "/deeper", "/deeper/still"])
def test_a_run_directory_that_cannot_be_made_is_refused(make_recipe, tmp_path, below) -> None:
    (tmp_path / "file").write_text("")
    recipe = make_recipe("dmd2", {"run_dir": f"{tmp_path}/file{below}"})
    with pytest.raises(UserError, match=r"run_dir: .*file.* is a file"):
        train(recipe)


def test_a_read_only_run_directory_is_refused(make_recipe, mount) -> None:
    disk = mount("ro")
    for run_dir in (disk, disk / "a" / "b"):
        with pytest.raises(UserError, match=r"run_dir: .* cannot be written"):
            train(make_recipe("dmd2", {"run_dir": str(run_dir)}))


def test_a_disk_that_fills_up_ends_the_run_with_a_clear_error(make_recipe, mount) -> None:
    disk = mount("size=900k")
    changes = {"run_dir": str(disk / "run"), "train.cycles": 200, "checkpoint.every": 1}
    with pytest.raises(UserError, match=r"No space left|no space is left"):
        train(make_recipe("dmd2", {**changes, "checkpoint.keep": 100}))
    last = complete_checkpoints(disk / "run")[-1]
    assert open_run(disk / "run").cycle == int(last.name[-6:])


# Runs that cannot go on, and runs that are stopped.


@pytest.mark.parametrize("role", ["student", "fake_score"])
def test_too_many_skips_end_the_run(make_recipe, monkeypatch, role) -> None:
    name = "student_loss" if role == "student" else "fake_score_loss"
    original = getattr(DMD2, name)

    def broken(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        return type(loss)(loss.loss * float("nan"), loss.metrics, outputs=loss.outputs)

    monkeypatch.setattr(DMD2, name, broken)
    recipe = make_recipe("dmd2", {"train.max_skipped_in_a_row": 4, "train.cycles": 9})
    with pytest.raises(TrainingError, match=f"^{role}: 4 updates in a row were skipped"):
        train(recipe)
    # What was logged up to then can be read.
    lines = (Path(recipe.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


def test_a_stop_before_the_first_cycle_leaves_a_run_that_can_go_on(
    make_recipe, tmp_path, flat_state, assert_equal_states
) -> None:
    whole = train(make_recipe("dmd2", {"run_dir": str(tmp_path / "whole")}))
    stop = StopRequest()
    stop.requested = True
    recipe = make_recipe()
    assert train(recipe, stop=stop).cycle == 0
    assert_equal_states(flat_state(train(recipe, resume=True)), flat_state(whole))


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from fewstep.config import load_recipe
from fewstep.launch.local import train
run = train(load_recipe(sys.argv[1]), on_cycle=lambda cycle, results: print(cycle, flush=True))
print("stopped after", run.cycle, run.complete, flush=True)
"""


def test_an_interrupted_process_saves_and_its_resume_is_bit_equal(
    make_recipe, tmp_path, flat_state, assert_equal_states
) -> None:
    changes = {"train.cycles": 400, "checkpoint.every": 1000, "storage": "shared_base"}
    recipe = make_recipe("dmd2", changes)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "2\n":
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read().split("stopped after ")
    assert process.wait(timeout=60) == 0
    stopped, complete = rest[1].split()
    assert complete == "False"
    last = int(stopped)
    assert 2 <= last < 400
    (saved,) = complete_checkpoints(tmp_path / "run")
    assert saved.name == f"cycle_{last:06d}"
    cycles = {**changes, "train.cycles": last + 2}
    resumed = train(make_recipe("dmd2", cycles), resume=True)
    assert resumed.cycles_run == 2
    whole = train(make_recipe("dmd2", {**cycles, "run_dir": str(tmp_path / "whole")}))
    assert_equal_states(flat_state(resumed), flat_state(whole))


# State.


def test_state_with_missing_or_additional_parts_is_refused(make_recipe) -> None:
    recipe = make_recipe()
    worker = build_worker(recipe, recipe.model.build(), None, teacher=None)
    for section in ("networks", "optimizers"):
        for change in ("missing", "extra"):
            state = worker.state_dict()
            if change == "missing":
                del state[section]["student"]
            else:
                state[section]["discriminator"] = {}
            with pytest.raises(UserError, match=f"the saved {section} are not those of the run"):
                worker.load_state_dict(state)
    state = worker.state_dict()
    state["optimizers"]["student"]["nowhere.weight/exp_avg"] = torch.zeros(1)
    with pytest.raises(UserError, match=r"nowhere\.weight"):
        worker.load_state_dict(state)
    worker.load_state_dict(worker.state_dict())


def test_samples_come_from_the_average_on_the_trained_grid(make_recipe) -> None:
    run = train(make_recipe())
    samples = run.sample(classes=[0, 2, 1])
    assert samples.images.shape == (3, 1, 4, 4)
    assert samples.network_calls == 2
    again = open_run(run.directory).sample(classes=[0, 2, 1])
    assert torch.equal(samples.images, again.images)
    student = run.sample(classes=[0, 2, 1], role="student")
    assert not torch.equal(student.images, samples.images)
    assert run.sample(count=5).labels.tolist() == [0, 1, 2, 0, 1]


class ScaledTeacher(nn.Module):
    """The exact teacher of four points, times a number that can be trained."""

    def __init__(self, prediction: str) -> None:
        super().__init__()
        self.exact = MixtureNetwork(POINTS, 0.1, RectifiedFlow(1.0), prediction)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.gain * self.exact(x, sigma)


POINTS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize("truth", ["eps", "x0", "velocity"])
def test_a_teacher_that_predicts_something_else_is_refused_with_figures(
    make_recipe, truth: str
) -> None:
    noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    data = Dataset(POINTS.float().repeat(50, 1) + 0.1 * noise)
    model = ModuleModel(lambda: ScaledTeacher(truth), (2,), prediction="velocity")
    recipe = make_recipe(
        "dmd2",
        {"model": {"family": "module"}, "data.name": "custom", "method.guidance": 1.0,
         "train.cycles": 1},
    )  # fmt: skip
    if truth == "velocity":
        assert train(recipe, model=model, data=data).complete
        return
    with pytest.raises(UserError, match=rf"misses the clean samples by .*read as '{truth}'"):
        train(recipe, model=model, data=data)
    assert not Path(recipe.run_dir).exists()


def test_some_roles_of_a_run_are_opened_without_the_rest(make_recipe, storage: str) -> None:
    run = train(make_recipe("dmd2", {"storage": storage}))
    opened = open_run(run.directory, roles=("student", "student_ema", "discriminator"))
    assert list(opened.roles) == ["student", "student_ema"]
    expected = {"student", "student_ema"} if storage == "independent" else {"base"}
    assert set(opened.roles.storage.networks) == expected
    assert not any(role.trainable for role in opened.roles.values())
    assert (opened.roles["student"].successful, opened.roles.ema_updates) == (4, 4)
    assert (opened.cycle, opened.result_role) == (4, "student_ema")
    for role in opened.roles:
        mine, whole = (r.roles.storage.plain_network(role).state_dict() for r in (opened, run))
        assert mine.keys() == whole.keys()
        assert all(torch.equal(mine[key], whole[key]) for key in whole)
