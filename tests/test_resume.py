"""A resumed run is the uninterrupted one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fewstep.checkpoint import (
    complete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    open_draft,
    plain_state,
    publish_draft,
    tensor_paths,
    write_part,
)
from fewstep.data.batches import DataBatches
from fewstep.data.dataset import Dataset
from fewstep.errors import UserError
from fewstep.launch.local import train
from fewstep.pretrained import resolve_recipe
from fewstep.run import open_run
from fewstep.training.loop import StopRequest
from fewstep.validation import ValidationHook

RUNS = {
    "independent": ("dmd2", {}),
    "shared_base": ("dmd2", {"storage": "shared_base"}),
    "reuse": ("dmd2", {"cycle.fake_batches": "reuse_student"}),
    "reuse, shared_base, fake first": (
        "dmd2",
        {
            "storage": "shared_base",
            "cycle.fake_batches": "reuse_student",
            "cycle.order": "fake_score_first",
        },
    ),
    "within the warm-up": ("dmd2", {"cycle.warmup_cycles": 3}),
    "at its end": ("dmd2", {"cycle.warmup_cycles": 2, "storage": "shared_base"}),
    "before the average starts": ("dmd2", {"ema.start": 4, "train.cycles": 5}),
    "schedule": (
        "dmd2",
        {
            "optimizers.student.schedule": {"kind": "cosine", "warmup_updates": 1, "updates": 5},
            "train.micro_batch_size": 3,
        },
    ),
    # Ten images: the third cycle of four goes across the end of an epoch.
    "flow_matching": ("flow_matching", {}),
    "flow_matching, shared_base": ("flow_matching", {"storage": "shared_base"}),
}

pytestmark = pytest.mark.usefixtures("no_sync")


def stopping(after: int):
    """A stop after a cycle, as `train` takes it."""
    stop = StopRequest()

    def on_cycle(cycle: int, results: Any) -> None:
        stop.requested = cycle >= after

    return {"stop": stop, "on_cycle": on_cycle}


def entries(directory: Path) -> list[dict[str, Any]]:
    """Metrics that do not depend on the time or on how often a run was started."""
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for entry in found:
        entry.pop("time")
        entry.pop("seconds_per_cycle", None)
    return [e for e in found if e["series"] not in ("reference", "warning")]


@pytest.mark.parametrize("name", RUNS)
def test_two_cycles_and_the_rest_are_all_cycles(
    make_recipe, tmp_path, ten_images, flat_state, assert_equal_states, name
) -> None:
    method, changes = RUNS[name]
    data = ten_images if method == "flow_matching" else None
    whole = train(make_recipe(method, {**changes, "run_dir": str(tmp_path / "whole")}), data=data)
    recipe = make_recipe(method, {**changes, "run_dir": str(tmp_path / "parts")})
    part = train(recipe, data=data, **stopping(after=2))
    assert part.cycle == 2
    assert not part.complete
    # What a global generator does in between must not matter.
    torch.manual_seed(123)
    resumed = train(recipe, data=data, resume=True)
    assert resumed.complete
    state = flat_state(resumed)
    assert_equal_states(state, flat_state(whole))
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")
    # And it is on disk as it is in memory.
    assert_equal_states(flat_state(open_run(tmp_path / "parts")), state)
    moved = [k for k, v in state.items() if not same(v, flat_state(part).get(k))]
    assert any(k.startswith("/networks") for k in moved)
    assert any(k.startswith("/optimizers") for k in moved)


def test_what_several_groups_have_saved_is_gone_on_with_by_one(
    make_recipe, tmp_path, storage, flat_state, assert_equal_states
) -> None:
    changes = {"storage": storage}
    whole = train(make_recipe("dmd2", {**changes, "run_dir": str(tmp_path / "whole")}))
    recipe = make_recipe("dmd2", changes)
    train(recipe, **stopping(after=2))
    path = latest_checkpoint(Path(recipe.run_dir))
    state = load_checkpoint(path)
    cycle = state.pop("cycle")
    documents = {f: (path / f).read_bytes() for f in ("recipe.yaml", "fingerprint.json")}
    shutil.rmtree(path)
    draft = open_draft(Path(recipe.run_dir), cycle, ["critic", "actor"])
    mine = [p for p in tensor_paths(state) if "fake_score" in p or "teacher_score" in p]
    rest = [p for p in tensor_paths(state) if p not in mine]
    files = write_part(draft, "critic", state, mine) | write_part(draft, "actor", state, rest)
    assert publish_draft(draft, plain_state(state), files, documents) == path
    resumed = train(recipe, resume=True)
    assert resumed.cycles_run == 2
    assert_equal_states(flat_state(resumed), flat_state(whole))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def test_data_order_goes_on(make_recipe, ten_images, tmp_path) -> None:
    """Every item once an epoch, whatever the interruptions."""
    seen: list[int] = []
    original = DataBatches.batch

    def spy(self, draw, size, rows):
        batch = original(self, draw, size, rows)
        for x0 in batch.x0:
            seen.append(int((ten_images.samples == x0).flatten(1).all(1).nonzero()))
        return batch

    recipe = make_recipe("flow_matching", {"train.cycles": 5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataBatches, "batch", spy)
        train(recipe, data=ten_images, **stopping(after=2))
        train(recipe, data=ten_images, resume=True)
    assert sorted(seen[:10]) == list(range(10))
    assert sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_a_crash_loses_the_cycles_since_the_checkpoint_and_no_more(
    make_recipe, tmp_path, flat_state, assert_equal_states
) -> None:
    whole = train(make_recipe("dmd2", {"run_dir": str(tmp_path / "whole")}))
    recipe = make_recipe()

    def crash(cycle: int, results: Any) -> None:
        if cycle == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(recipe, on_cycle=crash)
    assert [e["cycle"] for e in entries(Path(recipe.run_dir)) if e["series"] == "run"] == [1, 2, 3]
    again: list[int] = []
    resumed = train(recipe, resume=True, on_cycle=lambda cycle, results: again.append(cycle))
    assert again == [3, 4]
    assert_equal_states(flat_state(resumed), flat_state(whole))
    assert entries(Path(recipe.run_dir)) == entries(tmp_path / "whole")


def test_a_finished_run_can_be_extended(
    make_recipe, tmp_path, flat_state, assert_equal_states
) -> None:
    six = train(make_recipe("dmd2", {"train.cycles": 6, "run_dir": str(tmp_path / "six")}))
    train(make_recipe())
    run: list[int] = []
    extended = train(
        make_recipe("dmd2", {"train.cycles": 6}),
        resume=True,
        on_cycle=lambda cycle, results: run.append(cycle),
    )
    assert run == [5, 6]
    assert extended.cycle == 6
    assert_equal_states(flat_state(extended), flat_state(six))


@pytest.mark.parametrize("cycles", [4, 3, 1])
def test_a_complete_run_says_so_and_nothing_is_run(make_recipe, cycles) -> None:
    recipe = make_recipe()
    train(recipe)
    directory = Path(recipe.run_dir)
    before = {f: f.read_bytes() for f in directory.rglob("*") if f.is_file()}
    run: list[int] = []
    found = train(
        make_recipe("dmd2", {"train.cycles": cycles}),
        resume=True,
        on_cycle=lambda cycle, results: run.append(cycle),
    )
    assert found.complete
    assert found.cycle == 4
    assert run == []
    assert {f: f.read_bytes() for f in directory.rglob("*") if f.is_file()} == before


@pytest.mark.parametrize("what", ["nothing", "empty", "file", "no checkpoint"])
def test_resuming_from_nothing_is_an_error(make_recipe, tmp_path, what) -> None:
    recipe = make_recipe()
    directory = Path(recipe.run_dir)
    if what == "file":
        directory.write_text("")
    elif what != "nothing":
        directory.mkdir()
    if what == "no checkpoint":
        (directory / "recipe.yaml").write_text("")
    with pytest.raises(UserError, match=r"is a file|holds no complete checkpoint"):
        train(recipe, resume=True)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("tensors/shard-00001-model-00001-of-00006.safetensors", "missing"),
        ("tensors/shard-00001-model-00006-of-00006.safetensors", "flipped"),
        ("fingerprint.json", "flipped"),
        ("fingerprint.json", "missing"),
        ("tensors/shard-00001-model-00004-of-00006.safetensors", "truncated"),
        ("tensors/shard-00002-model-00001-of-00006.safetensors", "extra"),
    ],
)
def test_damage_stops_a_resume(make_recipe, file, damage) -> None:
    recipe = make_recipe("dmd2", {"train.cycles": 6})
    train(recipe, **stopping(after=4))
    target = latest_checkpoint(Path(recipe.run_dir)) / file
    if damage == "extra":
        target.write_bytes(b"")
    elif damage == "missing":
        target.unlink()
    else:
        content = bytearray(target.read_bytes())
        content[len(content) // 2] ^= 255
        target.write_bytes(content[: -1 if damage == "truncated" else None])
    with pytest.raises(UserError, match=file):
        train(recipe, resume=True)
    with pytest.raises(UserError, match=file):
        open_run(recipe.run_dir)
    if damage != "extra":
        # What the message proposes helps: the checkpoint before it is taken.
        shutil.rmtree(target.parents[len(Path(file).parts) - 1])
        assert train(recipe, resume=True).cycles_run == 4


# Changes of the recipe.

REFUSED = [
    ("optimizers.student.lr", 0.01, 0.02),
    ("optimizers.fake_score.weight_decay", 0.0, 0.1),
    ("method.guidance", 2.0, 3.0),
    ("method.steps", 2, 3),
    ("method.fake_updates_per_student", 2, 3),
    ("seed", 3, 4),
    ("train.batch_size", 4, 5),
    ("ema.decay", 0.5, 0.6),
    ("cycle.order", "student_first", "fake_score_first"),
    ("data.name", "none", "digits"),
    ("runtime.dtype", "float32", "float64"),
    ("lora.rank", 2, 3),
    ("model.prediction", "velocity", "v"),
]


@pytest.fixture
def stopped_run(make_recipe) -> dict[str, Any]:
    """Changes that make the recipe of a run that stopped after two of four cycles."""
    base = {"storage": "shared_base"}
    train(make_recipe("dmd2", base), **stopping(after=2))
    return base


def test_every_change_is_refused_with_key_old_and_new_value(make_recipe, stopped_run) -> None:
    for key, old, new in REFUSED:
        with pytest.raises(UserError) as error:
            train(make_recipe("dmd2", {**stopped_run, key: new}), resume=True)
        assert f"  {key}: was {old!r}, is {new!r}\n" in str(error.value)
    both = {"seed": 4, "optimizers.student.lr": 0.02}
    with pytest.raises(UserError) as error:
        train(make_recipe("dmd2", {**stopped_run, **both}), resume=True)
    assert [line for line in str(error.value).splitlines() if ": was " in line] == [
        "  optimizers.student.lr: was 0.01, is 0.02",
        "  seed: was 3, is 4",
    ]
    with pytest.raises(UserError, match=r"ema\.decay: was 0\.5, is '\(absent\)'"):
        train(make_recipe("dmd2", {**stopped_run, "ema": None}), resume=True)
    # Nothing was changed by the attempts.
    assert train(make_recipe("dmd2", stopped_run), resume=True).cycles_run == 2


def test_a_change_of_storage_is_refused(make_recipe, stopped_run) -> None:
    with pytest.raises(UserError, match=r"storage: was 'shared_base', is 'independent'"):
        train(make_recipe(), resume=True)


@pytest.mark.parametrize("what", ["values", "order", "labels", "length"])
def test_other_data_is_refused(make_recipe, ten_images, what) -> None:
    recipe = make_recipe("flow_matching")
    train(recipe, data=ten_images, **stopping(after=2))
    samples, labels = ten_images.samples.clone(), ten_images.labels.clone()
    if what == "values":
        samples[3, 0, 1, 1] += 1e-6
    elif what == "order":
        samples, labels = samples.flip(0), labels.flip(0)
    elif what == "labels":
        labels[0] = 2
    else:
        samples, labels = samples[:9], labels[:9]
    with pytest.raises(UserError, match=r"data\.sha256: was '\w+', is '\w+'"):
        train(recipe, data=Dataset(samples, labels), resume=True)
    same_again = Dataset(ten_images.samples.clone(), ten_images.labels.clone())
    assert train(recipe, data=same_again, resume=True).complete


@pytest.mark.parametrize(
    "changes",
    [
        {"train.cycles": 6},
        {"logging.every": 3},
        {"logging.tensorboard": True},
        {"checkpoint.every": 1, "checkpoint.keep": 1},
        {"train.micro_batch_size": 2},
        {"train.max_skipped_in_a_row": 7},
        {"runtime.threads": 1},
    ],
)
def test_what_may_change_is_accepted_and_written_down(make_recipe, changes) -> None:
    train(make_recipe(), **stopping(after=2))
    recipe = make_recipe("dmd2", changes)
    found = train(recipe, resume=True)
    assert found.complete
    assert found.cycles_run == recipe.train.cycles - 2
    assert open_run(recipe.run_dir).recipe == resolve_recipe(recipe)


def test_checkpoints_before_and_after_a_move_of_the_run(make_recipe, tmp_path) -> None:
    recipe = make_recipe()
    train(recipe, **stopping(after=2))
    Path(recipe.run_dir).rename(tmp_path / "moved")
    moved = make_recipe("dmd2", {"run_dir": str(tmp_path / "moved")})
    assert train(moved, resume=True).complete


def test_the_frozen_average_is_restored(make_recipe, storage) -> None:
    changes = {"storage": storage, "ema.start": 2}
    run = train(make_recipe("dmd2", changes), **stopping(after=3))
    opened = open_run(run.directory)
    assert opened.roles.ema_updates == 2
    for name in ("student", "student_ema"):
        for a, b in zip(opened.roles[name].tensors, run.roles[name].tensors, strict=True):
            assert torch.equal(a, b)
    pairs = zip(opened.roles["student_ema"].tensors, opened.roles["student"].tensors, strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert opened.result_role == "student_ema"


def test_a_directory_that_holds_a_run_is_refused(make_recipe) -> None:
    train(make_recipe())
    with pytest.raises(UserError, match=r"holds a run already \(up to cycle 4\).*--resume"):
        train(make_recipe("dmd2", {"seed": 9}))


def test_a_run_without_a_checkpoint_is_started_anew(
    make_recipe, tmp_path, caplog, flat_state, assert_equal_states
) -> None:
    recipe = make_recipe()
    train(recipe)
    directory = Path(recipe.run_dir)
    for checkpoint in complete_checkpoints(directory):
        (checkpoint / "manifest.json").unlink()
    (directory / "checkpoints" / "best.json").write_text("{}")
    with pytest.raises(UserError, match="no complete checkpoint to go on from; start it without"):
        train(recipe, resume=True)
    changes = {"seed": 9, "checkpoint.every": 3}
    run = train(make_recipe("dmd2", changes))
    assert "ended before its first checkpoint: starting it anew" in caplog.text
    whole = train(make_recipe("dmd2", {**changes, "run_dir": str(tmp_path / "whole")}))
    assert_equal_states(flat_state(run), flat_state(whole))
    assert entries(directory) == entries(tmp_path / "whole")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert sum('"reference"' in line for line in lines) == 1
    assert not (directory / "checkpoints" / "best.json").exists()
    assert open_run(directory).recipe.seed == 9


def test_a_run_goes_on_without_its_teacher(
    make_recipe, ten_images, tmp_path, storage, flat_state, assert_equal_states
) -> None:
    teacher = make_recipe("flow_matching", {"run_dir": str(tmp_path / "teacher")})
    train(teacher, data=ten_images)
    model = {"family": "dit", "weights": teacher.run_dir}
    changes = {"model": model, "storage": storage}
    whole = train(make_recipe("dmd2", {**changes, "run_dir": str(tmp_path / "whole")}))
    recipe = make_recipe("dmd2", changes)
    train(recipe, **stopping(after=2))
    shutil.rmtree(teacher.run_dir)
    with pytest.raises(UserError, match=r"model\.prediction is 'v', but"):
        train(make_recipe("dmd2", {**changes, "model": {**model, "prediction": "v"}}), resume=True)
    assert_equal_states(flat_state(train(recipe, resume=True)), flat_state(whole))


# The best.


@pytest.fixture
def scores(monkeypatch) -> dict[int, float]:
    """Validation gives these, by cycle."""
    values: dict[int, float] = {}
    original = ValidationHook.after_cycle

    def after_cycle(self, cycle, results) -> None:
        self.judge = lambda samples: {"frechet_distance": values[cycle], "recall": values[cycle]}
        original(self, cycle, results)

    monkeypatch.setattr(ValidationHook, "after_cycle", after_cycle)
    return values


VALIDATED = {
    "data.name": "custom",
    "validation": {"every": 1, "samples": 16},
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
}


@pytest.mark.parametrize(("metric", "best"), [("frechet_distance", 2), ("recall", 3)])
def test_the_best_is_kept_by_pruning_and_can_be_opened(
    make_recipe, ten_images, scores, flat_state, assert_equal_states, metric, best
) -> None:
    scores.update({1: 5.0, 2: 1.0, 3: 9.0, 4: 2.0})
    recipe = make_recipe("dmd2", {**VALIDATED, "validation.metric": metric})
    last = train(recipe, data=ten_images)
    directory = Path(recipe.run_dir)
    names = [p.name for p in complete_checkpoints(directory)]
    assert names == sorted({f"cycle_{best:06d}", "cycle_000004"})
    opened = open_run(directory, "best")
    assert opened.cycle == best
    assert open_run(directory, None).cycle == best
    assert open_run(directory).cycle == 4
    assert_equal_states(flat_state(open_run(directory)), flat_state(last))
    short = make_recipe("dmd2", {"train.cycles": best, "run_dir": str(directory) + "_short"})
    assert_equal_states(flat_state(opened), flat_state(train(short)))


def test_the_best_is_remembered_by_a_resumed_run(make_recipe, ten_images, scores) -> None:
    scores.update({1: 1.0, 2: 5.0, 3: 2.0, 4: 3.0})
    recipe = make_recipe("dmd2", VALIDATED)
    train(recipe, data=ten_images, **stopping(after=2))
    train(recipe, data=ten_images, resume=True)
    assert open_run(recipe.run_dir, "best").cycle == 1


def test_a_best_whose_checkpoint_is_gone_does_not_count(make_recipe, ten_images, scores) -> None:
    scores.update({1: 4.0, 2: 1.0, 3: 3.0, 4: 2.0})
    recipe = make_recipe("dmd2", {**VALIDATED, "checkpoint.keep": 9})
    train(recipe, data=ten_images, **stopping(after=2))
    shutil.rmtree(Path(recipe.run_dir) / "checkpoints" / "cycle_000002")
    scores[2] = 6.0
    train(recipe, data=ten_images, resume=True)
    assert open_run(recipe.run_dir, "best").cycle == 4


def test_figures_of_another_metric_are_not_compared(make_recipe, ten_images, scores) -> None:
    scores.update({1: 5.0, 2: 6.0, 3: 0.6, 4: 0.7})
    recipe = make_recipe("dmd2", VALIDATED)
    train(recipe, data=ten_images, **stopping(after=2))
    assert open_run(recipe.run_dir, "best").cycle == 1
    changed = make_recipe("dmd2", {**VALIDATED, "validation.metric": "recall"})
    train(changed, data=ten_images, resume=True)
    assert open_run(recipe.run_dir, "best").cycle == 4
    best = json.loads((Path(recipe.run_dir) / "checkpoints" / "best.json").read_text())
    assert best == {"cycle": 4, "metric": "recall", "value": 0.7}


def test_best_without_validation_is_an_error(make_recipe) -> None:
    recipe = make_recipe()
    train(recipe)
    with pytest.raises(UserError, match="no validation with a metric was run"):
        open_run(recipe.run_dir, "best")
    assert open_run(recipe.run_dir, None).cycle == 4
