"""An export samples the same in plain diffusers as here."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
)
from peft import LoraConfig

import fewstep
from fewstep.data.conditions import label_conditions
from fewstep.errors import UserError
from fewstep.export import export_run
from fewstep.export_check import by_diffusers, compared, conditions_to_check, sampled
from fewstep.export_lora import export_lora
from fewstep.methods.method import SamplerSpec
from fewstep.roles.storage import SharedBase
from fewstep.source import open_source

LORA_FILE = "pytorch_lora_weights.safetensors"
TINY = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 4}


def recipe(tmp_path: Path, storage: str, **method: object) -> fewstep.Recipe:
    values = {
        "run_dir": str(tmp_path / storage),
        "model": {"family": "dit", "network": TINY},
        "method": {
            "name": "dmd2",
            "steps": 3,
            "shift": 3.0,
            "fake_updates_per_student": 1,
            **method,
        },
        "storage": storage,
        "optimizers": {"student": {"lr": 1e-2}, "fake_score": {"lr": 1e-2}},
        "ema": {"decay": 0.5},
        "train": {"cycles": 3, "batch_size": 8},
        "logging": {"teacher_samples": 2, "tensorboard": False},
    }
    if storage == "shared_base":
        values["lora"] = {"rank": 4}
    return fewstep.parse_recipe(values)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], fewstep.Run]:
    made = {}
    for storage in ("independent", "shared_base"):
        for transition in ("renoise", "euler"):
            path = tmp_path_factory.mktemp(f"{storage}_{transition}")
            made[storage, transition] = fewstep.train(recipe(path, storage, transition=transition))
    return made


@pytest.mark.parametrize("storage", ["independent", "shared_base"])
@pytest.mark.parametrize("transition", ["renoise", "euler"])
@pytest.mark.parametrize("role", ["student", "student_ema"])
def test_plain_diffusers_gives_our_images(
    runs: dict, tmp_path: Path, storage: str, transition: str, role: str
) -> None:
    run = runs[storage, transition]
    directory = export_run(run, tmp_path / "export", role)
    # The loop of the export's README, by hand.
    network = DiTTransformer2DModel.from_pretrained(directory, subfolder="transformer").eval()
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(directory, subfolder="scheduler")
    scheduler.set_timesteps(sigmas=json.loads((directory / "fewstep.json").read_text())["sigmas"])
    assert scheduler.config.stochastic_sampling == (transition == "renoise")
    labels = torch.arange(10)
    torch.manual_seed(3)
    x = torch.randn(10, 1, 8, 8)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(network(x, t.expand(10), labels).sample, t, x).prev_sample
    # The pipeline, with its defaults.
    pipeline = DiffusionPipeline.from_pretrained(
        directory, custom_pipeline=str(directory), trust_remote_code=True
    )
    torch.manual_seed(3)
    torch.testing.assert_close(pipeline(labels), x, rtol=0, atol=1e-6)
    # Ours, written out: x0 = x - sigma v, then the transition.
    torch.manual_seed(3)
    y = torch.randn(10, 1, 8, 8)
    sigmas = [*run.method.sampler().sigmas, 0.0]
    with torch.no_grad(), run.roles.use(role) as student:
        for sigma, following in pairwise(sigmas):
            v = student(y, torch.tensor(sigma), {"class_labels": labels}).velocity
            fresh = torch.randn_like(y) if transition == "renoise" else y - sigma * v + v
            y = (1 - following) * (y - sigma * v) + following * fresh
    torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


def test_the_exported_pipeline_calls_the_network_at_exactly_the_trained_timesteps(
    runs: dict, tmp_path: Path
) -> None:
    directory = export_run(runs["independent", "renoise"], tmp_path / "export")
    pipeline = DiffusionPipeline.from_pretrained(
        directory, custom_pipeline=str(directory), trust_remote_code=True
    )
    seen: list[float] = []
    forward = pipeline.transformer.forward

    def spy(x: torch.Tensor, timestep: torch.Tensor, labels: torch.Tensor) -> object:
        seen.append(float(timestep[0]))
        return forward(x, timestep, labels)

    pipeline.transformer.forward = spy
    pipeline([0, 1])
    # linspace(1, 0, 4)[:-1] shifted by 3, times 1000
    assert seen == pytest.approx([1000.0, 1000 * 3 * (2 / 3) / (1 + 2 * 2 / 3), 600.0], abs=1e-3)


def test_the_readme_loop_runs_as_written(runs: dict, tmp_path: Path) -> None:
    directory = export_run(runs["independent", "euler"], tmp_path / "export")
    blocks = re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)
    code = "\n".join(blocks).replace('directory = "."', f"directory = {str(directory)!r}")
    names: dict[str, object] = {}
    exec(compile(code, "README", "exec"), names)
    assert isinstance(names["x"], torch.Tensor)
    assert names["x"].shape == names["images"].shape == (10, 1, 8, 8)


def test_an_export_is_sampled_like_its_run(runs: dict, tmp_path: Path) -> None:
    run = runs["shared_base", "renoise"]
    directory = export_run(run, tmp_path / "export")
    source = open_source(directory)
    labels = torch.arange(6)
    ours = run.sample(classes=labels, seed=5).images
    theirs = source.sample(label_conditions(labels), source.sampler(None), 5).images
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="samples in 3"):
        source.sampler(2)


def test_a_wrong_grid_is_noticed_by_the_check(runs: dict, tmp_path: Path) -> None:
    run = runs["independent", "renoise"]
    directory = export_run(run, tmp_path / "export")
    right, wrong = run.method.sampler(), SamplerSpec((1.0, 0.7, 0.4), "renoise")
    condition = conditions_to_check(run)
    theirs = by_diffusers(run.roles, directory, condition)
    assert compared(sampled(run.roles, "student_ema", right, condition), theirs) < 1e-4
    assert compared(sampled(run.roles, "student_ema", wrong, condition), theirs) > 1e-3


def test_an_ema_that_never_moved_is_refused(tmp_path: Path) -> None:
    late = recipe(tmp_path, "independent").model_copy(
        update={"ema": fewstep.config.EMASettings(start=50)}
    )
    run = fewstep.train(late)
    with pytest.raises(UserError, match="never updated"):
        export_run(run, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    export_run(run, tmp_path / "export", "student")


def test_roles_that_are_no_student_are_refused(runs: dict, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fake_score"):
        export_run(runs["independent", "euler"], tmp_path / "export", "fake_score")


def test_a_directory_with_other_files_is_not_replaced(runs: dict, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is no export"):
        export_run(runs["independent", "euler"], tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_earlier_export_is_replaced(runs: dict, tmp_path: Path) -> None:
    for transition in ("euler", "renoise"):
        directory = export_run(runs["independent", transition], tmp_path / "export")
        assert json.loads((directory / "fewstep.json").read_text())["solver"] == transition
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_an_exported_lora_loads_in_diffusers_with_every_key_and_gives_our_output(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    ).eval()  # fmt: skip
    network.save_pretrained(tmp_path / "base")
    # Rank and alpha differ, so that a lost alpha shows.
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    storage = SharedBase(network, ("student", "fake_score"), lora)
    for parameter in storage.parameters("student").values():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([500.0, 900.0]),
    }
    storage.activate("student")
    with torch.no_grad():
        ours = network(**inputs).sample
    export_lora(storage, "student", tmp_path / "lora")
    fresh = SD3Transformer2DModel.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        without = fresh(**inputs).sample
    fresh.load_lora_adapter(str(tmp_path / "lora"), weight_name=LORA_FILE)
    with torch.no_grad():
        theirs = fresh(**inputs).sample
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(theirs, without, atol=1e-2)
    assert len(fresh.peft_config) == 1
    loaded = {k: v for k, v in fresh.state_dict().items() if "lora_" in k}
    assert len(loaded) == len(storage.parameters("student"))
    output = capfd.readouterr().err
    assert "missing" not in output.lower()
    assert "unexpected" not in output.lower()


def test_a_readme_says_whether_it_is_of_a_student(make_recipe, ten_images, tmp_path) -> None:
    for method, title, said in (
        ("dmd2", "# A 2-step student\n", "Distilled with Fewstep (role `student_ema`, after"),
        ("flow_matching", "# A network trained\n", "Trained with Fewstep on data (role `student"),
    ):
        recipe = make_recipe(method, {"run_dir": str(tmp_path / method), "data.name": "custom"})
        run = fewstep.train(recipe, data=ten_images)
        text = (export_run(run, tmp_path / f"{method}_export") / "README.md").read_text()
        assert title in text
        assert said in text
        assert ("spoil" in text or "without guidance" in text) == (method == "dmd2")


# Samples that are not finite, and replacing.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_refused(
    runs: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    run = runs["independent", "euler"]
    plain_network = run.roles.storage.plain_network

    def broken(role: str) -> torch.nn.Module:
        network = plain_network(role)
        with torch.no_grad():
            next(network.parameters()).fill_(value)
        return network

    monkeypatch.setattr(run.roles.storage, "plain_network", broken)
    with pytest.raises(UserError, match="not finite"):
        export_run(run, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def contents(directory: Path) -> dict[str, bytes]:
    files = (p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def test_the_current_directory_is_replaced(
    runs: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_run(runs["independent", "euler"], tmp_path / "export")
    monkeypatch.chdir(tmp_path / "export")
    directory = export_run(runs["independent", "renoise"], ".")
    assert directory == tmp_path / "export"
    assert json.loads((directory / "fewstep.json").read_text())["solver"] == "renoise"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_an_export_that_cannot_be_moved_into_place_leaves_the_old_one(
    runs: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = export_run(runs["independent", "euler"], tmp_path / "export")
    before, rename = contents(directory), os.rename

    def fail(source: Path, target: Path) -> None:
        if source.name == ".export.tmp":
            raise OSError("broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UserError, match="could not be written"):
        export_run(runs["independent", "renoise"], directory)
    assert contents(directory) == before
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_what_a_killed_replacement_set_aside_goes_with_the_next_one(
    runs: dict, tmp_path: Path
) -> None:
    directory = export_run(runs["independent", "euler"], tmp_path / "export")
    directory.rename(tmp_path / ".export.old")
    export_run(runs["independent", "renoise"], directory)
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("storage", ["independent", "shared_base"])
def test_the_readme_tells_of_an_adapter_where_there_is_one(
    runs: dict, tmp_path: Path, storage: str
) -> None:
    directory = export_run(runs[storage, "euler"], tmp_path / "export")
    told = "merged already" in (directory / "README.md").read_text()
    assert told == (directory / "lora").is_dir() == (storage == "shared_base")
