"""What can be sampled: which runs have steps of their own, and what of a run is opened for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fewstep
from fewstep.errors import UserError
from fewstep.export import export_run
from fewstep.methods.adversarial import AdversarialSettings
from fewstep.methods.dmd2 import DMD2Settings
from fewstep.methods.flow_matching import FlowMatchingSettings
from fewstep.run import open_run
from fewstep.source import open_source, run_source

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.mark.parametrize(
    ("settings", "few_step"),
    [
        (FlowMatchingSettings(name="flow_matching"), False),
        (DMD2Settings(name="dmd2"), True),
        (DMD2Settings(name="dmd2", adversarial=AdversarialSettings()), True),
    ],
)
def test_students_have_steps_of_their_own_with_and_without_data(
    settings: Any, few_step: bool
) -> None:
    run: Any = SimpleNamespace(
        directory=Path("run"),
        roles={},
        result_role="student",
        method=settings.build(),
        recipe=SimpleNamespace(
            data=None, runtime=SimpleNamespace(threads=1, torch_compute_dtype=None)
        ),
        items=None,
    )
    assert run_source(run).few_step is few_step


@pytest.mark.parametrize("role", ["student", "student_ema", "fake_score", "teacher_score"])
@pytest.mark.parametrize(("dtype", "compute"), [("float64", None), ("float32", "bfloat16")])
def test_a_role_is_opened_alone_and_is_that_of_the_run(
    make_recipe, storage: str, role: str, dtype: str, compute: str | None
) -> None:
    runtime = {"dtype": dtype, "compute_dtype": compute}
    run = fewstep.train(make_recipe("dmd2", {"storage": storage, "runtime": runtime}))
    expected = open_run(run.directory).sample(5, role=role, seed=3).images
    source = open_source(run.directory, role=role)
    assert source.few_step == role.startswith("student")
    found = source.sample(source.conditions(5), source.sampler(None), 3).images
    assert torch.equal(found, expected)
    assert list(source.roles.storage.networks) == [role if storage == "independent" else "base"]
    assert not any(one.trainable for one in source.roles.values())
    others = {"student", "student_ema", "fake_score"} - {role}
    assert len(others & set(source.roles)) == (storage == "shared_base" and role == "teacher_score")


def test_a_classifier_is_no_role_to_sample(make_recipe, ten_images) -> None:
    changes = {"method.adversarial": {}, "data": {"name": "custom"}}
    changes["optimizers.discriminator"] = {"lr": 0.01}
    run = fewstep.train(make_recipe("dmd2", changes), data=ten_images)
    with pytest.raises(UserError, match=r"--role discriminator: .* has student, fake_score"):
        open_source(run.directory, role="discriminator")
    assert open_source(run.directory, role="fake_score").role == "fake_score"


def test_the_device_is_the_runs_or_the_cpu_where_that_is_gone(
    make_recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = fewstep.train(make_recipe("dmd2"))
    written = run.directory / "recipe.yaml"
    written.write_text(written.read_text().replace("device: cpu", "device: cuda:99"))
    source = open_source(run.directory)
    assert source.roles.device == torch.device("cpu")
    assert "sampling on the CPU: 'cuda:99', where it was trained, is not here" in caplog.text
    expected = run.sample(3).images
    assert torch.equal(
        source.sample(source.conditions(3), source.sampler(None), 0).images, expected
    )
    export = export_run(run, tmp_path / "export", verify=False)
    for path in (run.directory, export):
        for wrong in ("cuda:99", "meta", "", "what"):
            with pytest.raises(UserError, match=f"--device: '{wrong}': "):
                open_source(path, device=wrong)
    assert open_source(export, device="cpu").roles.device == torch.device("cpu")
