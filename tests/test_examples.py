"""The example scripts run as they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
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
