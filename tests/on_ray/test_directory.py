"""Relative paths on nodes that were started elsewhere; run as a script it is the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewstep.config import parse_recipe
from fewstep.errors import UserError
from fewstep.launch.ray.cluster import enter


def drive(elsewhere: str, directory: str) -> None:
    """Start a cluster in one directory, and train in another, whose paths are relative."""
    from ray.cluster_utils import Cluster

    import fewstep

    os.chdir(elsewhere)
    node = {"num_cpus": 1, "resources": {"accelerator": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    os.chdir(directory)
    recipe = parse_recipe(
        {
            "run_dir": "run",
            "model": {"family": "mixture", "width": 8, "depth": 1},
            "method": {"name": "dmd2", "steps": 2, "fake_updates_per_student": 1},
            "optimizers": {"student": {"lr": 0.01}, "fake_score": {"lr": 0.01}},
            "train": {"cycles": 1, "batch_size": 8},
            "logging": {"teacher_samples": 2, "tensorboard": False},
            "launch": {"kind": "ray", "address": cluster.address},
        }
    )
    fewstep.train(recipe)
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_paths_are_those_of_the_driver(tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "directory"
    elsewhere.mkdir()
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, __file__, str(elsewhere), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(elsewhere.iterdir()) == []
    assert [file.name for file in (directory / "run/checkpoints").glob("cycle_*")] == [
        "cycle_000001"
    ]


def test_a_node_without_the_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"launch.address: .*/nowhere, .* All nodes must see"):
        enter(None, str(tmp_path / "nowhere"))


if __name__ == "__main__":
    drive(*sys.argv[1:])
