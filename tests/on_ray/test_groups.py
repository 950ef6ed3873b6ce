"""Two groups that take turns: what is done when, what is where, and what is written of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from PIL import Image

import fewstep
from fewstep.plan import cycle_steps
from fewstep.training.timeline import Span, read_trace

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from cases import make_recipe, ten_images

BATCH, CLASSES = 6, 3
CHANGES: dict[str, Any] = {
    "storage": "shared_base",
    "train.cycles": 6,
    "train.batch_size": BATCH,
    "cycle.order": "fake_score_first",
    "cycle.warmup_cycles": 0,
    "method.fake_updates_per_student": 2,
    "validation": {"every": 3, "samples": 16, "batch_size": 10, "features": "raw"},
    "data": {"name": "custom"},
}
ON_RAY = {
    "launch.kind": "ray",
    "placement.groups": {
        "critic": ["fake_score", "teacher_score"],
        "actor": ["student", "student_ema"],
    },
    "placement.offload": True,
}


def read(run_dir: Path, series: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["series"] == series]


@pytest.fixture(scope="module")
def ran(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run on one worker of each kind, and the same in this process."""
    folder = tmp_path_factory.mktemp("groups")
    recipe = make_recipe(folder / "ray", {**CHANGES, **ON_RAY})
    resident: list[dict[str, int]] = []

    def on_cycle(cycle: int, results: Any) -> None:
        found = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].startswith(("critic", "actor")):
                handle = ray.get_actor(actor["name"], actor["namespace"])
                found[actor["name"]] = ray.get(handle.resident_bytes.remote())
        resident.append(found)

    run = fewstep.train(recipe, data=ten_images(), on_cycle=on_cycle)
    fewstep.train(make_recipe(folder / "alone", CHANGES), data=ten_images())
    return {"recipe": recipe, "run": run, "resident": resident, "folder": folder}


@pytest.mark.slow
def test_one_group_at_a_time_is_on_the_accelerator(ran: dict[str, Any]) -> None:
    tensors = ran["run"].roles.storage.tensors["base"]
    size = {key: t.numel() * t.element_size() for key, t in tensors.items()}
    adapters = {
        role: sum(n for key, n in size.items() if f".{role}." in key)
        for role in ("student", "fake_score", "student_ema")
    }
    base = sum(size.values()) - sum(adapters.values())
    for cycle, found in enumerate(ran["resident"], 1):
        assert found.keys() == {"critic/0", "actor/0"}
        assert min(found.values()) == 0 < max(found.values())
        if cycle % 3 == 0:
            continue  # a student that is the best was saved, the group that is next to train last
        assert found["critic/0"] == 0
        # The base, the adapters, and two moments of the one that is trained, besides step counts
        # and the buffers that are not saved.
        least = base + 3 * adapters["student"] + adapters["student_ema"]
        assert least <= found["actor/0"] < least + 0.2 * base


@pytest.mark.slow
def test_the_cycle_runs_as_it_was_planned(ran: dict[str, Any]) -> None:
    spans = [s for s in read_trace(ran["folder"] / "ray" / "timeline.json") if s.cycle == 2]

    def name(span: Span) -> str:
        if span.kind == "offload":
            return f"{span.name} {span.lane.partition('/')[0]}"
        return {"gather": "push"}.get(span.name, span.name)

    happened = [
        name(s)
        for s in sorted(spans, key=lambda s: s.start)
        if s.name not in ("load", "confirm", "hand-off") and s.kind != "rollout"
    ]
    planned = [s.name for s in cycle_steps(ran["recipe"], 2) if not s.name.startswith("rollout")]
    assert happened == [name for name in planned if name not in ("validate", "save")]
    assert {s.name for s in spans if s.kind == "rollout"} == {
        s.name for s in cycle_steps(ran["recipe"], 2) if s.name.startswith("rollout")
    }
    # One leaves the accelerator before the other takes it.
    ends = {name(s): s.start + s.seconds for s in spans}
    starts = {name(s): s.start for s in spans}
    assert ends["sleep critic"] <= starts["wake actor"] + 1e-3


@pytest.mark.slow
def test_bytes_are_counted_once(ran: dict[str, Any]) -> None:
    timing = read(ran["folder"] / "ray", "timing")
    assert [entry["cycle"] for entry in timing] == [1, 2, 3, 4, 5, 6]
    sample, ids = BATCH * 16 * 8, BATCH * 8
    # Samples for two phases of the fake score and for the scores; a direction and counts.
    # Each with ids, and the versions of the student behind them.
    handed = 3 * sample + sample + ids + 4 * 2 * ids
    assert {entry["hand_off_bytes"] for entry in timing} == {handed}
    student = ran["run"].roles["student"].parameter_count * 8
    assert timing[1]["push_bytes"] == student
    for entry in timing:
        assert 0 < entry["train_critic_seconds"] < entry["seconds"]
        assert 0 < entry["rollout_seconds"] < entry["seconds"]
        assert entry["driver_seconds"] < entry["seconds"]


@pytest.mark.slow
def test_rollout_workers_make_the_samples_that_the_student_is_judged_by(
    ran: dict[str, Any],
) -> None:
    found, expected = (read(ran["folder"] / name, "validation") for name in ("ray", "alone"))
    assert [entry["cycle"] for entry in found] == [3, 6]
    for mine, other in zip(found, expected, strict=True):
        # The average was sent to the workers, not the student.
        assert mine["frechet_distance"] == pytest.approx(other["frechet_distance"], rel=1e-6)
    for series in ("student", "fake_score", "run"):
        mine, other = (read(ran["folder"] / name, series) for name in ("ray", "alone"))
        assert [(e["cycle"], e["step"]) for e in mine] == [(e["cycle"], e["step"]) for e in other]
        if series != "run":
            for a, b in zip(mine, other, strict=True):
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)


@pytest.mark.slow
def test_the_shares_of_several_rollout_workers_are_put_in_order(
    cluster: None, tmp_path: Path
) -> None:
    changes = {**CHANGES, "train.cycles": 1, "validation.every": 1}
    pictures = []
    for name, more in (("alone", {}), ("ray", {"launch.kind": "ray", "rollout.workers": 2})):
        fewstep.train(make_recipe(tmp_path / name, {**changes, **more}), data=ten_images())
        (file,) = (tmp_path / name / "validation").iterdir()
        with Image.open(file) as picture:
            pictures.append(np.asarray(picture, dtype=float))
    assert pictures[0].std() > 20  # samples that differ
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
