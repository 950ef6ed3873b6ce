"""A tiny Stable Diffusion 3 from prompts to a student, through the command line, everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from clip_model import write_tiny_clip
from sd3_pipeline import write_tiny_pipeline
from typer.testing import CliRunner

import fewstep as library
from fewstep.checkpoint import latest_checkpoint, load_checkpoint, read_best
from fewstep.cli import app
from fewstep.methods.method import SamplerSpec
from fewstep.run import Run, open_run
from fewstep.source import open_source

PROMPTS = ["a cat", "the red house", "a red cat on the house", "a house", "the cat", "a red thing"]
OPTIMIZER = {"lr": 1e-3, "clip_norm": 1.0}
STORAGES = ("independent", "shared_base")
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline, prompts and held-out prompts."""
    folder = tmp_path_factory.mktemp("text_to_image")
    write_tiny_pipeline(folder / "pipeline")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "held_out.txt").write_text("a cat on a house\nthe red cat\n")
    return folder


@pytest.fixture(scope="module")
def recipe_of(folder: Path) -> Callable[..., Path]:
    """A recipe file: guided, with an average, validated by its pictures."""

    def write(storage: str, name: str, **changes: Any) -> Path:
        values = {
            "seed": 5,
            "run_dir": str(folder / name),
            "model": {"family": "sd3", "weights": str(folder / "pipeline")},
            "data": {
                "name": "prompts",
                "files": [str(folder / "prompts.txt")],
                "validation": [str(folder / "held_out.txt")],
                "encoded": str(folder / "encoded"),
                "dtype": "float32",
            },
            "method": {
                "name": "dmd2",
                "steps": 2,
                "shift": 3.0,
                "guidance": 4.0,
                "fake_updates_per_student": 2,
            },
            "storage": storage,
            "optimizers": {"student": OPTIMIZER, "fake_score": OPTIMIZER},
            "ema": {"decay": 0.5},
            "train": {"cycles": 3, "batch_size": 4, "micro_batch_size": 2},
            "validation": {"every": 2, "samples": 16, "metric": None},
            "checkpoint": {"every": 2},
            "logging": {"teacher_samples": 2, "tensorboard": False},
            "runtime": {"dtype": "float64"},
            **({"lora": {"rank": 2}} if storage == "shared_base" else {}),
            **changes,
        }
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        return file

    return write


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the latest checkpoint, by network and name."""
    run = open_run(run_dir)
    state = load_checkpoint(latest_checkpoint(run_dir), run.worker.empty_state)
    return {f"{n}/{k}": t for n, group in state["networks"].items() for k, t in group.items()}


def command(*words: object) -> None:
    """Run a command in this process."""
    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def encoded(recipe_of: Callable[..., Path]) -> None:
    """The prompts, encoded."""
    command("encode", recipe_of("independent", "first"))


@pytest.fixture(scope="module")
def alone(encoded: None, folder: Path, recipe_of: Callable[..., Path]) -> dict[str, Path]:
    """A run in this process for each storage."""
    for storage in STORAGES:
        command("train", recipe_of(storage, storage))
    return {storage: folder / storage for storage in STORAGES}


def largest_difference(left: Path, right: Path) -> float:
    """Of two runs' weights, relative to each tensor's norm."""
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    norms = [(ours[k] - t).norm() / t.norm().clamp(min=1e-9) for k, t in theirs.items()]
    return float(torch.stack(norms).max())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_student_learns_from_prompts(alone: dict[str, Path], storage: str) -> None:
    run: Run = open_run(alone[storage])
    assert run.complete
    assert run.roles["student"].successful == 3
    assert run.roles["fake_score"].successful == 6
    pictures = sorted(p.name for p in (alone[storage] / "validation").iterdir())
    assert pictures == ["cycle_000002.png", "cycle_000003.png"]
    samples = run.sample(10)
    # Those held out come first, then those it was trained on, and so on again.
    assert samples.conditions.prompts[:3] == ("a cat on a house", "the red cat", "a cat")
    assert samples.conditions.prompts[8] == "a cat on a house"
    assert samples.images.shape == (10, 3, 64, 64)
    assert samples.network_calls == 2
    assert not torch.equal(samples.images[0], samples.images[1])
    one, same = (run.sample(3, seed=s).images for s in (0, 0))
    assert torch.equal(one, same)


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage", ["independent", pytest.param("shared_base", marks=pytest.mark.exhaustive)]
)
def test_two_ranks_give_the_same(
    alone: dict[str, Path], folder: Path, recipe_of: Callable[..., Path], fewstep, storage: str
) -> None:
    name = f"{storage}_ranks"
    file = recipe_of(storage, name, parallel={"kind": "fsdp2"}, launch={"processes": 2})
    code, out, err = fewstep("train", file)
    assert code == 0, out + err
    assert largest_difference(folder / name, alone[storage]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage", ["shared_base", pytest.param("independent", marks=pytest.mark.exhaustive)]
)
def test_two_groups_on_ray_give_the_same(
    nothing_left: Any, encoded: None, folder: Path, recipe_of: Callable[..., Path], storage: str
) -> None:
    groups = {"critic": ["fake_score", "teacher_score"], "actor": ["student", "student_ema"]}
    order = {"order": "fake_score_first"}
    alone, on_ray = f"{storage}_first", f"{storage}_ray"
    library.train(library.load_recipe(recipe_of(storage, alone, cycle=order)))
    where = {"launch": {"kind": "ray"}, "placement": {"groups": groups, "offload": True}}
    library.train(library.load_recipe(recipe_of(storage, on_ray, cycle=order, **where)))
    assert largest_difference(folder / on_ray, folder / alone) < 1e-9
    assert sorted(p.name for p in (folder / on_ray / "validation").iterdir())


def test_prompts_of_the_command_line_are_encoded_and_sampled(
    alone: dict[str, Path], folder: Path, fewstep, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("a cat\n\nthe red house\n")
    source, out = alone["shared_base"], tmp_path / "mine.safetensors"
    code, said, err = fewstep(
        "sample", source, "--prompts", tmp_path / "mine.txt", "--prompt", "the house", "--out", out
    )
    assert code == 0, err
    assert "3 samples" in said
    for arguments, problem in (
        (["--prompts", tmp_path / "none.txt"], "is no text file"),
        (["--classes", "1"], "--classes: the network takes prompts"),
    ):
        code, _, err = fewstep("sample", source, *arguments)
        assert code == 2
        assert problem in err


@pytest.mark.parametrize("name", ["text_encoder_2", "text_encoder_3"])
def test_an_encoder_that_is_gone_is_missed_where_prompts_are_encoded(
    alone: dict[str, Path], folder: Path, fewstep, tmp_path: Path, name: str
) -> None:
    run = alone["shared_base"]
    (folder / "pipeline" / name).rename(tmp_path / name)
    try:
        out = ("--out", tmp_path / "out.safetensors")
        refused = fewstep("sample", run, "--prompt", "a cat", *out), fewstep("export", run)
        assert fewstep("sample", run, "--count", 2, *out)[0] == 0  # of prompts encoded before
    finally:
        (tmp_path / name).rename(folder / "pipeline" / name)
    for code, _, err in refused:
        assert code == 2
        assert f"were encoded by ({name} is gone" in err
    assert not (run / "export").exists()
    assert fewstep("sample", run, "--prompt", "a cat", *out)[0] == 0


def test_a_run_goes_on_and_is_exported_without_a_pipeline_that_is_gone(
    encoded: None, folder: Path, recipe_of: Callable[..., Path], fewstep, tmp_path: Path
) -> None:
    file = recipe_of("shared_base", "without", validation=None)
    assert fewstep("train", file)[0] == 0
    (folder / "pipeline").rename(tmp_path / "pipeline")
    try:
        done = [
            fewstep("train", file, "train.cycles=4", "--resume"),
            fewstep("export", folder / "without", "--format", "network", "--no-verify"),
            fewstep("sample", folder / "without", "--out", tmp_path / "x.safetensors"),
        ]
    finally:
        (tmp_path / "pipeline").rename(folder / "pipeline")
    assert [code for code, _, _ in done] == [0, 0, 2]
    assert "Complete: 4 cycles" in done[0][1]
    assert f"model.pipeline: {folder / 'pipeline'} is not a directory" in done[2][2]


def test_what_has_not_been_encoded_is_said_before_anything_is_loaded(
    folder: Path, recipe_of: Callable[..., Path], fewstep
) -> None:
    file = recipe_of("independent", "not_encoded")
    values = yaml.safe_load(file.read_text())
    values["data"]["encoded"] = str(folder / "nothing")
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    code, _, err = fewstep("train", file)
    assert code == 2
    assert "fewstep encode" in err
    assert not (folder / "not_encoded").exists()


def test_prompts_alone_have_no_distance_to_real_images(
    alone: dict[str, Path], recipe_of: Callable[..., Path], fewstep
) -> None:
    file = recipe_of("independent", "with_metric", validation={"every": 1, "samples": 16})
    code, _, err = fewstep("train", file)
    assert code == 2
    assert "validation.metric: 'frechet_distance' compares with real images" in err
    code, _, err = fewstep("evaluate", alone["independent"])
    assert code == 2
    assert "prompts alone" in err


def test_a_run_on_prompts_is_judged_by_clip(
    alone: dict[str, Path], folder: Path, recipe_of: Callable[..., Path], fewstep, tmp_path: Path
) -> None:
    clip = write_tiny_clip(folder / "clip")
    judged = {"every": 1, "samples": 16, "metric": "clip_score", "clip": str(clip)}
    code, _, err = fewstep("train", recipe_of("independent", "judged", validation=judged))
    assert code == 0, err
    lines = (folder / "judged" / "metrics.jsonl").read_text().splitlines()
    scores = {
        line["cycle"]: line["clip_score"]
        for line in map(json.loads, lines)
        if line["series"] == "validation"
    }
    assert sorted(scores) == [1, 2, 3]
    assert read_best(folder / "judged")["cycle"] == max(scores, key=lambda cycle: scores[cycle])
    out = tmp_path / "out"
    code, said, err = fewstep(
        "evaluate", alone["independent"], "--clip", clip, "--samples", 16, "--out", out
    )
    assert code == 0, err
    assert "CLIP score" in said
    row = json.loads((out / "evaluation.json").read_text())["results"][0]
    assert row["nfe"] == 2
    assert 0 <= row["clip_score"] <= 100


def test_a_run_whose_encoded_data_are_gone_is_sampled_by_prompts(
    alone: dict[str, Path], folder: Path, fewstep, tmp_path: Path
) -> None:
    run = shutil.copytree(alone["independent"], tmp_path / "run")
    recipe = (run / "recipe.yaml").read_text().replace(str(folder / "encoded"), "gone")
    (run / "recipe.yaml").write_text(recipe)
    out = tmp_path / "one.safetensors"
    code, _, err = fewstep("sample", run, "--prompt", "a cat", "--out", out)
    assert code == 0, err
    code, _, err = fewstep("sample", run, "--out", out)
    assert code == 2
    assert "this network takes prompts, and there are none: sample it with --prompts" in err


def test_a_guided_teacher_whose_encoded_data_are_gone_is_sampled_by_prompts(
    alone: dict[str, Path], folder: Path, fewstep, tmp_path: Path
) -> None:
    run = shutil.copytree(alone["independent"], tmp_path / "run")
    guided, images = SamplerSpec((1.0, 0.5), "euler", 3.0), {}
    for gone in (False, True):
        if gone:
            recipe = (run / "recipe.yaml").read_text().replace(str(folder / "encoded"), "gone")
            (run / "recipe.yaml").write_text(recipe)
        source = open_source(run, role="teacher_score")
        images[gone] = source.sample(source.encode(["a cat"]), guided, 0).images
    assert torch.allclose(images[True], images[False], atol=1e-5)
