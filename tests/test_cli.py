"""The command line: what it makes, what it says, and its exit codes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fewstep import cli
from fewstep.launch import local
from fewstep.launch.lock import RunLock
from fewstep.run import open_run

ROOT = Path(__file__).parents[1]
NETWORK = (
    "model.network={num_layers: 1, num_attention_heads: 1, attention_head_dim: 8, patch_size: 4}"
)
RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained teacher and two students, made by the command itself."""
    folder = tmp_path_factory.mktemp("project")
    teacher = [NETWORK, "train.cycles=6", "train.batch_size=16", "checkpoint.every=3"]
    student = [
        "train.cycles=4",
        "train.batch_size=8",
        "cycle.warmup_cycles=0",
        f"model.weights={folder / 'teacher'}",
    ]
    student += ["validation.every=2", "validation.samples=32", "checkpoint.every=2"]
    command(folder / "teacher", "recipes/digits/teacher.yaml", *teacher)
    command(folder / "student", "recipes/digits/student.yaml", *student)
    command(folder / "shared", "recipes/digits/student_shared.yaml", *student, "lora.rank=2")
    return folder


def command(run_dir: Path, *arguments: str) -> None:
    """`fewstep train` in a process of its own, as a user runs it."""
    line = [sys.executable, "-m", "fewstep", "train", *arguments, "--run-dir", str(run_dir)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Complete" in done.stdout


def test_training_leaves_a_whole_run_directory(project: Path) -> None:
    names = {path.name for path in (project / "student").iterdir()}
    assert names == {"recipe.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "validation"}
    assert [path.name for path in (project / "student" / "validation").iterdir()]
    lines = (project / "student" / "metrics.jsonl").read_text().splitlines()
    series = {json.loads(line)["series"] for line in lines}
    assert {"student", "fake_score", "validation", "reference", "run"} <= series


def test_a_run_directory_that_holds_a_run_is_refused_and_untouched(
    fewstep: RunCommand, project: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (project / "teacher").rglob("*")}
    code, _, err = fewstep("train", "recipes/digits/teacher.yaml", "--run-dir", project / "teacher")
    assert code == 2
    assert "holds a run already (up to cycle 6)" in err
    assert "--resume" in err
    assert before == {p: p.stat().st_mtime_ns for p in (project / "teacher").rglob("*")}


def test_resuming_a_complete_run_says_that_it_is_complete(
    fewstep: RunCommand, project: Path
) -> None:
    changes = [NETWORK, "train.cycles=6", "train.batch_size=16"]
    code, out, _ = fewstep(
        "train", "recipes/digits/teacher.yaml", *changes, "--run-dir", project / "teacher",
        "--resume",
    )  # fmt: skip
    assert code == 0
    assert "is complete already: all 6 cycles are done" in out


def tiny(tmp_path: Path) -> list[str]:
    """Arguments of a run of a second."""
    changes = [NETWORK, "train.cycles=1", "train.batch_size=4", "logging.tensorboard=false"]
    changes += ["method.sampling.steps=1", "validation=null"]
    return [str(ROOT / "recipes/digits/teacher.yaml"), *changes, "--run-dir", str(tmp_path / "run")]


def test_resume_auto_starts_a_run_or_goes_on_with_it(fewstep: RunCommand, tmp_path: Path) -> None:
    recipe, *rest = tiny(tmp_path)
    code, _, err = fewstep("train", recipe, *rest, "--resume")
    assert code == 2
    assert "holds no complete checkpoint to go on from" in err
    assert not (tmp_path / "run").exists()
    code, out, err = fewstep("train", recipe, *rest, "--resume", "auto")
    assert code == 0, err
    assert "Complete: 1 cycles" in out
    code, out, _ = fewstep("train", "--resume", recipe, *rest)
    assert code == 0
    assert "is complete already" in out
    code, out, _ = fewstep("train", recipe, *rest, "--resume", "train.cycles=2")
    assert code == 0
    assert "Complete: 2 cycles" in out
    code, out, _ = fewstep("train", recipe, *rest, "--resume=auto", "train.cycles=3")
    assert code == 0
    assert "Complete: 3 cycles" in out


@pytest.mark.parametrize("arguments", [["--resume", "latest"], ["--resume=yes"]])
def test_resume_names_its_choices(
    fewstep: RunCommand, tmp_path: Path, arguments: list[str]
) -> None:
    code, _, err = fewstep("train", *tiny(tmp_path), *arguments)
    assert code == 2
    assert f"--resume: {arguments[-1].removeprefix('--resume=')!r} is given" in err
    assert "--resume alone" in err
    assert "--resume auto" in err


def test_a_run_directory_in_use_is_refused_with_the_process_that_uses_it(
    fewstep: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        for resume in ([], ["--resume"], ["--resume", "auto"]):
            code, _, err = fewstep("train", *tiny(tmp_path), *resume)
            assert code == 2
            assert f"is in use: process {os.getpid()} trains there" in err
    assert list((tmp_path / "run").iterdir()) == []
    assert fewstep("train", *tiny(tmp_path))[0] == 0


@pytest.mark.parametrize("name", ["my #1 run", "x${seed}", "2024", "true", "a: [b]", "a\\${x}\\"])
def test_a_run_directory_may_have_any_name(
    fewstep: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    recipe = ROOT / "recipes/digits/teacher.yaml"
    monkeypatch.chdir(tmp_path)
    changes = [NETWORK, "train.cycles=1", "train.batch_size=4", "logging.tensorboard=false"]
    changes += ["method.sampling.steps=1", "validation=null"]
    code, out, err = fewstep("train", recipe, *changes, "--run-dir", name)
    assert code == 0, err
    assert (tmp_path / name / "recipe.yaml").is_file()
    following = next(line for line in out.splitlines() if line.startswith("Next: "))
    assert shlex.split(following)[1:] == ["fewstep", "sample", name, "--out", "samples.png"]
    assert open_run(name).recipe.run_dir == name
    assert fewstep(*shlex.split(following)[2:])[0] == 0


def test_an_empty_run_directory_is_refused(fewstep: RunCommand) -> None:
    for empty in ("", " "):
        code, _, err = fewstep("train", "recipes/digits/teacher.yaml", "--run-dir", empty)
        assert code == 2
        assert "--run-dir: is empty" in err


def test_the_command_to_go_on_with_is_whole(
    fewstep: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = local.train_cycles

    def stopped(worker, cycles, k, settings, hooks, stop, *others):
        stop.requested = True
        return original(worker, cycles, k, settings, hooks, stop, *others)

    monkeypatch.setattr(local, "train_cycles", stopped)
    run_dir = str(tmp_path / ("my #1 run" + 20 * "-long"))
    arguments = ["train", "recipes/digits/teacher.yaml", NETWORK, "--run-dir", run_dir]
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = fewstep(*arguments)
    assert code == cli.INTERRUPTED
    assert shlex.split(out.splitlines()[-1]) == ["fewstep", *arguments, "--resume"]


def test_ctrl_c_outside_of_training_is_reported(
    fewstep: RunCommand, monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fewstep.source.open_source", interrupt)
    code, _, err = fewstep("sample", project / "student")
    assert code == 130
    assert "interrupted; what was saved before is untouched" in err
    code, _, err = fewstep("sample")
    assert code == 2
    assert "Missing argument" in err
    assert "interrupted" not in err


def test_a_misspelt_key_names_the_right_one(fewstep: RunCommand) -> None:
    code, _, err = fewstep(
        "train", "recipes/digits/student.yaml", "method.fake_update_per_student=3"
    )
    assert code == 2
    assert "method.fake_update_per_student: there is no such key" in err
    assert "did you mean method.fake_updates_per_student?" in err
    assert "recipes/digits/student.yaml" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("method.fake_updates_per_student=0", "greater than or equal to 1"),
        ("method.steps=0", "greater than or equal to 1"),
        ("method.steps=2.5", "whole number"),
        ("train.cycles=true", "whole number"),
        ("optimizers.student.lr=false", "should be a number"),
        ("optimizers.student.lr=fast", "should be a number"),
        ("storage=shared", "'independent' or 'shared_base'"),
        ("lora={rank: 4}", "lora: only for storage 'shared_base'"),
        ("model.weights=/does/not/exist", "/does/not/exist"),
        ("runtime.device=cuda:99", "runtime.device"),
        ("not an override", "write key=value"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(
    fewstep: RunCommand, project: Path, tmp_path: Path, change: str, words: str
) -> None:
    base = [f"model.weights={project / 'teacher'}", "train.cycles=2", "cycle.warmup_cycles=0"]
    code, _, err = fewstep(
        "train", "recipes/digits/student.yaml", *base, change, "--run-dir", tmp_path / "run"
    )
    assert code == 2
    assert words in err
    assert not (tmp_path / "run").exists()


def test_a_lora_pattern_that_matches_nothing_is_named_with_those_that_exist(
    fewstep: RunCommand, project: Path, tmp_path: Path
) -> None:
    code, _, err = fewstep(
        "train", "recipes/digits/student_shared.yaml", f"model.weights={project / 'teacher'}",
        "lora.targets=[to_qq]", "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert code == 2
    assert "'to_qq' matches no module" in err
    assert "attn1.to_q" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_weights_of_a_teacher_are_named(
    fewstep: RunCommand, project: Path, tmp_path: Path, damage: str
) -> None:
    code, _, _ = fewstep("export", project / "teacher", "--out", tmp_path / "export")
    assert code == 0
    weights = tmp_path / "export" / "transformer" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    else:
        content[3] ^= 0xFF  # in the header's length
    weights.write_bytes(content)
    code, _, err = fewstep(
        "train", "recipes/digits/student.yaml", f"model.weights={weights.parent}",
        "train.cycles=2", "cycle.warmup_cycles=0", "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert code == 2
    assert "diffusion_pytorch_model.safetensors is corrupt or truncated" in err
    assert not (tmp_path / "run").exists()


def test_a_directory_of_diffusers_is_a_teacher(
    fewstep: RunCommand, project: Path, tmp_path: Path
) -> None:
    fewstep("export", project / "teacher", "--out", tmp_path / "export")
    code, out, err = fewstep(
        "train", "recipes/digits/student.yaml", f"model.weights={tmp_path}/export/transformer",
        "train.cycles=1", "cycle.warmup_cycles=0", "train.batch_size=4", "validation=null",
        "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    assert "Complete: 1 cycles" in out


def test_sample_writes_a_grid_a_folder_or_a_tensor(
    fewstep: RunCommand, project: Path, tmp_path: Path
) -> None:
    code, out, _ = fewstep("sample", project / "student", "--out", tmp_path / "grid.png")
    assert code == 0
    assert "4 steps, 4 network calls each" in out
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.width == 10 * picture.height + 9 * (picture.height // 8)
    labels = ["--classes", "0-2,9", "--count", "6", "--seed", "3"]
    fewstep("sample", project / "student", *labels, "--out", tmp_path / "folder")
    assert len(list((tmp_path / "folder").glob("*.png"))) == 6
    for name in ("a", "b"):
        fewstep("sample", project / "student", *labels, "--out", tmp_path / f"{name}.safetensors")
    first, second = (load_file(tmp_path / f"{n}.safetensors")["samples"] for n in "ab")
    assert first.shape == (6, 1, 8, 8)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--classes", "3,x"], "'x' is no number or range"),
        (["--classes", "10"], "--classes: '10' is given; it takes numbers from 0 to 9"),
        (["--classes", "0-99999999999999"], "it takes numbers from 0 to 9"),
        (["--classes", "3-1"], "it takes numbers from 0 to 9"),
        (["--prompts", "prompts.txt"], "--prompts"),
        (["--out", "samples.bmp"], "end it in .png"),
        (["--role", "teacher"], "--role teacher"),
    ],
)
def test_sample_refuses_what_it_cannot_do(
    fewstep: RunCommand, project: Path, arguments: list[str], words: str
) -> None:
    code, _, err = fewstep("sample", project / "student", *arguments)
    assert code == 2
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sample", "nowhere", "--out", "x.bmp"], "--out x.bmp: end it in .png"),
        (["sample", "nowhere", "--out", "folder.png"], "--out folder.png: is a directory"),
        (["sample", "nowhere", "--out", "link"], "--out link: is a link to nothing"),
        (["evaluate", "nowhere", "--out", "link/x"], "link is a link to nothing"),
        (["sample", "nowhere", "--out", "file/below/x.png"], "--out: file/below cannot be made"),
        (["sample", "nowhere", "--prompts", "none.txt"], "--prompts: none.txt is no text file"),
        (["sample", "nowhere", "--prompt", "a \udcff"], "--prompt: the prompt is no Unicode text"),
        (["evaluate", "nowhere", "--steps", "4,x"], "--steps: 'x' is no number"),
        (["evaluate", "nowhere", "--out", "file"], "--out: file cannot be made"),
    ],
)
def test_what_could_not_be_written_in_the_end_is_refused_before_anything_is_opened(
    fewstep: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    Path("file").touch()
    Path("link").symlink_to("nothing")
    code, _, err = fewstep(*arguments)
    assert code == 2
    assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png", "link"]


@pytest.mark.parametrize("option", [["--role", "student"], ["--which", "latest"]])
def test_an_export_has_no_roles_or_checkpoints_to_choose_from(
    fewstep: RunCommand, project: Path, tmp_path: Path, option: list[str]
) -> None:
    assert fewstep("export", project / "student", "--out", tmp_path / "export")[0] == 0
    code, _, err = fewstep("sample", tmp_path / "export", *option, "--out", tmp_path / "x.png")
    assert code == 2
    assert f"{option[0]}: " in err
    assert "is an export, which holds one network" in err


def test_sampling_a_student_at_other_steps_is_pointed_out(
    fewstep: RunCommand, project: Path, tmp_path: Path
) -> None:
    code, out, err = fewstep(
        "sample", project / "student", "--steps", 2, "--out", tmp_path / "two.png"
    )
    assert code == 0
    assert "2 steps, 2 network calls" in out
    assert "trained for 4 steps only" in err


def test_evaluate_writes_figures_and_report(
    fewstep: RunCommand, project: Path, tmp_path: Path
) -> None:
    code, out, _ = fewstep(
        "evaluate", project / "teacher", project / "student", project / "shared",
        "--steps", "1,4,8", "--samples", 64, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    document = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    rows = [(r["model"], r["steps"], r["nfe"]) for r in document["results"]]
    assert rows == [
        ("teacher", 1, 1), ("teacher", 4, 4), ("teacher", 8, 8), ("student", 4, 4),
        ("shared", 4, 4),
    ]  # fmt: skip
    assert set(document["floor"]) <= set(document["results"][0])
    assert (tmp_path / "out" / "report.html").is_file()
    assert (tmp_path / "out" / "comparison.png").is_file()
    assert "Evaluation" in out


def test_evaluation_needs_something_to_evaluate(fewstep: RunCommand, tmp_path: Path) -> None:
    code, _, err = fewstep("evaluate", tmp_path)
    assert code == 2
    assert "is neither a run directory" in err


def test_export_says_that_it_was_checked(
    fewstep: RunCommand, project: Path, tmp_path: Path
) -> None:
    code, out, _ = fewstep(
        "export", project / "shared", "--role", "student", "--which", "best",
        "--out", tmp_path / "export",
    )  # fmt: skip
    assert code == 0
    assert "plain diffusers gives the same images" in out
    code, _, err = fewstep("export", project / "teacher", "--which", "best")
    assert code == 2
    assert "no best checkpoint" in err


def test_the_frozen_teacher_of_a_student_is_evaluated_beside_it(
    fewstep: RunCommand, project: Path, tmp_path: Path
) -> None:
    def rows(*arguments: object) -> list[dict[str, object]]:
        out = tmp_path / "out"
        options = ("--steps", "1,4", "--samples", 64, "--out", out)
        code, _, err = fewstep("evaluate", *arguments, *options)
        assert code == 0, err
        found = json.loads((out / "evaluation.json").read_text())["results"]
        return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in found]

    found = rows(project / "student", "--teacher")
    names = [(row["model"], row["steps"], row["nfe"]) for row in found]
    assert names == [
        ("student", 4, 4), ("student's teacher", 1, 1), ("student's teacher", 4, 4),
    ]  # fmt: skip
    assert [file.name for file in (tmp_path / "out").glob("*_loss.png")] == ["student_loss.png"]
    alone = rows(project / "teacher")
    assert [row | {"model": ""} for row in found[1:]] == [row | {"model": ""} for row in alone]
    code, _, err = fewstep("evaluate", project / "teacher", "--teacher")
    assert code == 2
    assert "--teacher: none of these is a distilled run" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "lora"], "--format lora: the student has a network of its own"),
        (["--role", "student_ema"], "--role student_ema: this run has student"),
        (["--out", "file/below/export"], "--out: file/below cannot be made: "),
        (["--out", "folder"], "folder exists and is no export"),
    ],
)
def test_an_export_that_cannot_be_is_refused_before_weights_are_read(
    fewstep: RunCommand,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    run = shutil.copytree(project / "teacher", tmp_path / "run")
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(re.sub(r"\nema:\n(  .*\n)+", "\nema: null\n", recipe))
    for file in (run / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(b"no weights")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    Path("folder", "precious.txt").touch()
    code, _, err = fewstep("export", run, *arguments)
    assert code == 2
    assert words.replace("file/below", f"{tmp_path}/file/below") in err


def test_inspect_shows_recipe_roles_cycle_and_updates(fewstep: RunCommand, project: Path) -> None:
    code, out, _ = fewstep("inspect", project / "shared")
    assert code == 0
    for words in (
        "storage: shared_base", "adapter student_ema", "student -> fake_score/0",
        "cycle_000004", "frechet_distance",
    ):  # fmt: skip
        assert words in out, words
    ema = next(line for line in out.splitlines() if "student_ema" in line and "adapter" not in line)
    assert "4" in ema  # its updates
    code, out, _ = fewstep("inspect", "recipes/digits/teacher.yaml")
    assert code == 0
    assert "Saved" in out


def test_inspecting_a_recipe_counts_without_loading(fewstep: RunCommand, project: Path) -> None:
    code, out, _ = fewstep(
        "inspect", "recipes/digits/student_shared.yaml",
        f"model.weights={project / 'teacher'}", "lora.rank=2",
    )  # fmt: skip
    assert code == 0
    assert "teacher_score" in out


def test_help_teaches(fewstep: RunCommand) -> None:
    code, out, _ = fewstep("--help")
    assert code == 0
    assert "fewstep train recipes/digits/teacher.yaml" in out
    for name in ("train", "sample", "evaluate", "export", "inspect"):
        code, out, _ = fewstep(name, "--help")
        assert code == 0
        assert len(out.splitlines()) > 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(
    project: Path, tmp_path: Path, number: signal.Signals
) -> None:
    line = [
        sys.executable, "-m", "fewstep", "train", "recipes/digits/student.yaml",
        f"model.weights={project / 'teacher'}", "train.cycles=100000", "train.batch_size=4",
        "validation=null", "logging.every=1", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    process = subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"fake_score"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "Stopped and saved after cycle" in out
    assert "--resume" in out
    assert "Traceback" not in err
    assert not (tmp_path / "run" / ".lock").exists()
    assert len(list((tmp_path / "run" / "checkpoints").glob("cycle_*"))) == 1
