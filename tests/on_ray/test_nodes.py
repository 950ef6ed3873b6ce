"""A cluster of several nodes, each with a store of its own; run as a script it is the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fewstep
from fewstep.config import parse_recipe

OPTIMIZER = {"lr": 0.01, "betas": [0.5, 0.9]}


def make_recipe(run_dir: Path, **sections: Any) -> fewstep.Recipe:
    values = {
        "seed": 3,
        "run_dir": str(run_dir),
        "model": {"family": "mixture", "width": 16, "depth": 1},
        "method": {"name": "dmd2", "steps": 2, "fake_updates_per_student": 2},
        "optimizers": {"student": OPTIMIZER, "fake_score": OPTIMIZER},
        "cycle": {"order": "fake_score_first"},
        # So large that samples go through the nodes' stores, not along with the calls.
        "train": {"cycles": 3, "batch_size": 20_000},
        "checkpoint": {"every": 10},
        "logging": {"teacher_samples": 2, "tensorboard": False},
        "runtime": {"dtype": "float64"},
        **sections,
    }
    return parse_recipe(values)


def drive(directory: Path) -> None:
    """Train on two nodes, and write down where every process was."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "resources": {"accelerator": 1}}
    # Beside other tests, workers of the usual niceness may take minutes to start.
    head = {**node, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node)
    nodes: dict[str, str] = {}

    def on_cycle(cycle: int, results: Any) -> None:
        for actor in ray.util.list_named_actors(all_namespaces=True):
            handle = ray.get_actor(actor["name"], actor["namespace"])
            where = handle.__ray_call__.remote(
                lambda process: ray.get_runtime_context().get_node_id()
            )
            nodes[actor["name"]] = ray.get(where)

    recipe = make_recipe(
        directory / "nodes",
        launch={"kind": "ray", "processes": 2, "address": cluster.address},
        placement={
            "groups": {"critic": ["fake_score", "teacher_score"], "actor": ["student"]},
            "timeout_seconds": 300,
        },
        rollout={"workers": 1},
    )
    run = fewstep.train(recipe, on_cycle=on_cycle)
    save_file(tensors(run), directory / "nodes.safetensors")
    (directory / "nodes.json").write_text(json.dumps(nodes))
    cluster.shutdown()


def tensors(run: fewstep.Run) -> dict[str, torch.Tensor]:
    held = run.roles.storage.tensors
    return {f"{n}/{k}": t.detach().clone() for n, own in held.items() for k, t in own.items()}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_a_run_over_two_nodes_is_that_of_one_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    nodes = json.loads((tmp_path / "nodes.json").read_text())
    assert nodes.keys() == {"critic/0", "critic/1", "actor/0", "actor/1", "rollout/0"}
    assert nodes["critic/0"] == nodes["actor/0"] == nodes["rollout/0"]
    assert nodes["critic/1"] == nodes["actor/1"] != nodes["critic/0"]
    expected = tensors(fewstep.train(make_recipe(tmp_path / "alone")))
    found = load_file(tmp_path / "nodes.safetensors")
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11)


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
