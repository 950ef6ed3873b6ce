"""What many tests need: tiny networks, roles over them, recipes and comparisons."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from xdist.scheduler import LoadScopeScheduling

from fewstep.config import Recipe, parse_recipe
from fewstep.data.dataset import Dataset
from fewstep.models.dit import DiT, DiTNetwork
from fewstep.models.mixture import PointNetwork
from fewstep.models.model import Model
from fewstep.models.module import ModuleModel
from fewstep.parallel.sharding import Replicated, spread
from fewstep.roles.ema import EMASettings
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import Roles
from fewstep.roles.storage import LoraSettings, build_independent, build_shared_base
from fewstep.run import Run

torch.set_num_threads(1)

TINY_DIT = {
    "sample_size": 4,
    "in_channels": 1,
    "patch_size": 2,
    "num_layers": 1,
    "num_attention_heads": 1,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": 3,
}
ROLES = ("student", "fake_score", "teacher_score")

BuildRoles = Callable[..., Roles]
MakeRecipe = Callable[..., Recipe]
RunCommand = Callable[..., tuple[int, str, str]]
# Logical accelerators of the tests' Ray cluster.
WORKERS = 2


# Beside those with "on_ray" in their path, the files that need a Ray cluster.
ON_RAY = ("test_text_to_image.py", "test_examples.py")


def group_of(nodeid: str) -> str:
    """The tests that one process does, as they share what is made once: a file, or all on Ray.

    A second cluster would take a tenth of a processor even at rest.
    """
    file = nodeid.partition("::")[0]
    return "ray" if "on_ray" in file or file.endswith(ON_RAY) else file


class GroupScheduling(LoadScopeScheduling):
    """Hands out whole groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """How several processes share the tests (`-n 2 --no-loadscope-reorder`)."""
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes longest, so that no process is left alone with it at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda i: (group_of(i.nodeid) != "ray", i.path not in slow))


@pytest.fixture(params=["independent", "shared_base"])
def storage(request: pytest.FixtureRequest) -> str:
    """Each kind of storage in turn."""
    return str(request.param)


@pytest.fixture
def point_model() -> ModuleModel:
    """Points in the plane, a perceptron of eight hidden units."""
    return ModuleModel(lambda: PointNetwork(2, 8, 1), (2,))


@pytest.fixture
def dit_model() -> DiT:
    """A DiT of two layers on images of four by four."""
    return DiT(DiTNetwork(**{**TINY_DIT, "num_layers": 2}))


@pytest.fixture
def build_roles() -> BuildRoles:
    """Roles over a model, by default with weights that differ from role to role."""

    def build(
        model: Model,
        storage: str,
        names: Sequence[str] = ROLES,
        trained: Sequence[str] = ("student", "fake_score"),
        *,
        optimizer: OptimizerSettings | None = None,
        ema: EMASettings | None = None,
        dtype: torch.dtype = torch.float64,
        targets: tuple[str, ...] | None = None,
        scramble: bool = True,
        teacher: nn.Module | None = None,
    ) -> Roles:
        settings = optimizer or OptimizerSettings(lr=1e-3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            teacher = teacher or model.build_network()
            if storage == "shared_base":
                if targets is None and not model.lora_targets:
                    targets = ("0", "2")
                lora = LoraSettings(rank=2, targets=targets)
                adapters = [n for n in names if n != "teacher_score"]
                weights: Any = build_shared_base(model, teacher, adapters, lora)
            else:
                weights = build_independent(model, teacher, names)
            spread(weights, Replicated(), model.blocks, None, dtype=dtype)
            roles = Roles(model, weights, names, dict.fromkeys(trained, settings), ema, dtype=dtype)
            if scramble:
                with torch.no_grad():
                    for name in trained:
                        for parameter in roles[name].tensors:
                            parameter.add_(0.3 * torch.randn_like(parameter))
        return roles

    return build


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """values["a"]["b"] = value, for "a.b"."""
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


@pytest.fixture
def recipe_values(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Plain data of a tiny recipe of a method, with some dotted keys changed."""
    optimizer = {"lr": 0.01, "betas": [0.5, 0.9], "clip_norm": 1.0}
    network = {"family": "dit", "network": TINY_DIT}
    common = {
        "seed": 3,
        "run_dir": str(tmp_path / "run"),
        "model": network,
        "train": {"cycles": 4, "batch_size": 4},
        "checkpoint": {"every": 2, "keep": 2},
        "logging": {"every": 1, "teacher_samples": 2, "tensorboard": False},
        "ema": {"decay": 0.5},
    }
    methods: dict[str, dict[str, Any]] = {
        "dmd2": {
            "method": {"name": "dmd2", "steps": 2, "fake_updates_per_student": 2, "guidance": 2.0},
            "optimizers": {"student": dict(optimizer), "fake_score": dict(optimizer)},
        },
        "flow_matching": {
            "method": {"name": "flow_matching", "sampling": {"steps": 2}},
            "data": {"name": "custom"},
            "optimizers": {"student": optimizer},
        },
    }

    def make(method: str = "dmd2", changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        values = copy.deepcopy({**common, **methods[method]})
        changes = copy.deepcopy(dict(changes or {}))
        if changes.get("storage") == "shared_base" and "lora" not in changes:
            changes.setdefault("lora.rank", 2)
        for key, value in changes.items():
            set_dotted(values, key, value)
        return values

    return make


@pytest.fixture
def make_recipe(recipe_values: Callable[..., dict[str, Any]]) -> MakeRecipe:
    """A tiny recipe of a method, with some dotted keys changed."""

    def make(method: str = "dmd2", changes: Mapping[str, Any] | None = None) -> Recipe:
        return parse_recipe(recipe_values(method, changes))

    return make


@pytest.fixture
def ten_images() -> Dataset:
    """Ten random images with labels, of the tiny DiT's shape."""
    generator = torch.Generator().manual_seed(5)
    return Dataset(torch.randn(10, 1, 4, 4, generator=generator), torch.arange(10) % 3)


@pytest.fixture
def flat_state() -> Callable[[Run], dict[str, Any]]:
    """All state of a run, one entry a tensor or counter."""

    def flatten(run: Run) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def visit(prefix: str, value: Any) -> None:
            if isinstance(value, Mapping):
                for key, entry in value.items():
                    visit(f"{prefix}/{key}", entry)
            else:
                found[prefix] = value.clone() if isinstance(value, Tensor) else value

        visit("", run.worker.state_dict())
        return found

    return flatten


@pytest.fixture
def assert_equal_states() -> Callable[[Mapping[str, Any], Mapping[str, Any]], None]:
    """Fail unless two flat states are equal bit for bit."""

    def check(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
        assert left.keys() == right.keys()
        for key, value in left.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, right[key]), key
            else:
                assert value == right[key], key

    return check


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing to the disk takes most of the time of a tiny run."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a small file system of its own; skips the test where that is not allowed."""
    mounted: list[Path] = []

    def make(options: str, name: str = "disk") -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        command = shutil.which("mount")
        if command is None:
            pytest.skip("there is no mount command")
        done = subprocess.run(
            [command, "-t", "tmpfs", "-o", options, "tmpfs", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A real Ray cluster on this machine with two logical accelerators, for all tests."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        resources={"accelerator": WORKERS},
        include_dashboard=False,
        _system_config={"worker_niceness": 0},
        log_to_driver=False,
        configure_logging=False,
        namespace="tests",
    )
    yield
    ray.shutdown()


def ray_processes(pid: int | None = None) -> list[psutil.Process]:
    """Processes of trainers and rollout workers below a process, by default this one."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words and words[0].startswith(("ray::TrainerProcess", "ray::RolloutProcess")):
            found.append(process)
    return found


def left_over() -> dict[str, Any]:
    """What a run that has ended has left on the cluster of this process."""
    import ray
    from ray.util.placement_group import placement_group_table

    free = ray.available_resources().get("accelerator", 0)
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return {
        key: value
        for key, value in {
            "actors": ray.util.list_named_actors(all_namespaces=True),
            "groups": groups,
            "taken": WORKERS - free,
            "processes": [p.pid for p in ray_processes() if p.is_running()],
        }.items()
        if value
    }


@pytest.fixture
def nothing_left(cluster: None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Fails a test whose run has left anything behind within ten seconds."""
    yield left_over
    end = time.monotonic() + 10
    while (found := left_over()) and time.monotonic() < end:
        time.sleep(0.1)
    assert not found


@pytest.fixture
def fewstep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run the command in this process: exit code, standard output, standard error."""
    from fewstep import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fewstep", *map(str, arguments)])
        monkeypatch.setattr(cli, "console", cli.Console(width=300))
        monkeypatch.setattr(cli, "errors", cli.Console(width=300, stderr=True))
        code: object = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert isinstance(code, int)
        return code, out, err

    return run
