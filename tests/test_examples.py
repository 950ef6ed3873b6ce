"""The example scripts run as they are."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_your_own_network_is_distilled_to_one_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/your_own_network.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = r"(\w+), (\d+) network calls: coverage ([\d.]+), Fréchet distance ([\d.]+)"
    found = {
        (name, int(n)): (float(c), float(d)) for name, n, c, d in re.findall(line, done.stdout)
    }
    assert set(found) == {("teacher", 1), ("teacher", 4), ("teacher", 50), ("student", 1)}
    # One step of the teacher is useless; one step of the student does what fifty of it do.
    assert found["teacher", 1][0] < 0.1
    assert found["student", 1][0] > 0.8 * found["teacher", 50][0]
    assert found["student", 1][1] < 0.1 * found["teacher", 4][1]


@pytest.fixture
def ray_demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`examples/ray_demo.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("ray_demo")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_demo_on_ray_shows_the_same_run_three_times(
    ray_demo: Any,
    cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fewstep.cli import app

    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    # The commands themselves, but on the tests' cluster, and without a process for each.
    monkeypatch.setattr(ray_demo, "call", lambda *words: app(list(words), standalone_mode=False))
    ray_demo.main(short=True)
    said = capsys.readouterr().out
    out = tmp_path / "runs/digits/ray"
    results = json.loads((out / "evaluation.json").read_text())["results"]
    found = {row["model"]: row["frechet_distance"] for row in results}
    # So few cycles do not drift apart, and another order of phases is another run.
    assert found["one_group"] == pytest.approx(found["student"], rel=1e-4)
    assert found["two_groups"] == pytest.approx(found["fake_first"], rel=1e-4)
    assert found["two_groups"] != pytest.approx(found["one_group"], rel=1e-4)
    for seat in ("trainer/0 0.7000", "critic/0 0.3500", "actor/0 0.3500", "rollout/0 0.2500"):
        assert seat in said
    (picture,) = re.findall(r"Timeline: +(\S+)", said)
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("on_ray", "close"), [(1.09, True), (0.92, True), (1.11, False), (0.9, False)]
)
@pytest.mark.parametrize("run", ["one_group", "two_groups"])
def test_the_demo_on_ray_notices_another_result(ray_demo, run, on_ray, close) -> None:
    distances = {"student": 0.3, "one_group": 0.3, "fake_first": 0.4, "two_groups": 0.4}
    distances[run] *= on_ray
    rows = [{"model": name, "frechet_distance": value} for name, value in distances.items()]
    assert ray_demo.compare({"results": rows}) is close
