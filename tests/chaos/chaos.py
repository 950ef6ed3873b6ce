"""Kill a run again and again, go on with it, and compare it with one that was never stopped.

`python tests/chaos/chaos.py --kills 30` (or `make chaos`). A run of two ranks saves after every
cycle and keeps one checkpoint, so most moments are in the middle of saving or pruning. Every kill
is SIGKILL for all of its processes at once. After each, the newest checkpoint must load; at the end
the weights, the optimizers and the counters must be those of the uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from fewstep.checkpoint import (
    complete_checkpoints,
    is_complete,
    latest_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)

OPTIMIZER = {"lr": 0.01, "clip_norm": 1.0}
RECIPE: dict[str, Any] = {
    "model": {
        "family": "dit",
        "network": {
            "sample_size": 4,
            "num_layers": 2,
            "num_attention_heads": 1,
            "attention_head_dim": 8,
            "num_embeds_ada_norm": 3,
        },
    },
    "method": {"name": "dmd2", "steps": 2, "fake_updates_per_student": 1, "guidance": 2.0},
    "storage": "shared_base",
    "lora": {"rank": 2},
    "optimizers": {"student": OPTIMIZER, "fake_score": OPTIMIZER},
    "ema": {"decay": 0.9},
    "cycle": {"warmup_cycles": 5},
    "checkpoint": {"every": 1, "keep": 1},
    "logging": {"teacher_samples": 2, "tensorboard": False},
}


def write_recipe(file: Path, run_dir: Path, cycles: int) -> Path:
    """Write the recipe of a run."""
    values = {**RECIPE, "run_dir": str(run_dir), "train": {"cycles": cycles, "batch_size": 4}}
    file.write_text(yaml.safe_dump(values))
    return file


def start(recipe: Path, kind: str, *more: str) -> subprocess.Popen[bytes]:
    """Start or go on with a run of two ranks."""
    command = [sys.executable, "-m", "fewstep", "train", str(recipe), "launch.processes=2"]
    command += [f"parallel.kind={kind}", *more, "--resume", "auto"]
    output = open(recipe.with_suffix(".log"), "ab")  # noqa: SIM115 (the process writes to it)
    return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the process and all that it started, and wait until they are gone."""
    parent = psutil.Process(process.pid)
    family = [*parent.children(recursive=True), parent]
    for member in family:
        member.suspend()  # nobody may do anything between the first kill and the last
    for member in family:
        member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)


def newest(run_dir: Path) -> int:
    """The newest complete checkpoint's cycle; 0 for none."""
    found = complete_checkpoints(run_dir)
    return int(found[-1].name[-6:]) if found else 0


def wait_until_it_trains(process: subprocess.Popen[bytes], run_dir: Path, seconds: float) -> bool:
    """Wait until the run has saved something new; False where it ended before that."""
    before, until = newest(run_dir), time.monotonic() + seconds
    while newest(run_dir) == before:
        if process.poll() is not None:
            return False
        if time.monotonic() > until:
            kill(process)
            raise SystemExit(f"the run saved nothing in {seconds:.0f} s")
        time.sleep(0.01)
    return True


def moment(run_dir: Path) -> str:
    """What the run was doing when it was killed, as its directory shows."""
    directory = run_dir / "checkpoints"
    if any(directory.glob(".cycle_*.tmp")):
        return "while saving"
    if any(not is_complete(path) for path in directory.glob("cycle_*")):
        return "while pruning"
    return "between"


def kill_again_and_again(
    recipe: Path, run_dir: Path, kind: str, kills: int, rng: random.Random
) -> Counter[str]:
    """Start, kill at a random moment, check; how many kills hit which moment."""
    moments: Counter[str] = Counter()
    for number in range(kills):
        # Every other run saves in the background.
        process = start(recipe, kind, f"checkpoint.asynchronous={str(number % 2 == 1).lower()}")
        if not wait_until_it_trains(process, run_dir, seconds=180):
            raise SystemExit(f"it ended by itself after {number} kills; raise --cycles")
        time.sleep(rng.uniform(0, 1.5))
        kill(process)
        moments[moment(run_dir)] += 1
        verify_checkpoint(latest_checkpoint(run_dir))
        print(f"kill {number + 1}: {moment(run_dir)}, at cycle {newest(run_dir)}", flush=True)
    return moments


def finish(recipe: Path, kind: str, *more: str) -> None:
    """Run to the end."""
    process = start(recipe, kind, *more)
    if process.wait() != 0:
        raise SystemExit(recipe.with_suffix(".log").read_text()[-3000:])


def differences(left: Path, right: Path) -> list[str]:
    """Tensors and counters in which the last checkpoints of two runs differ."""
    one, other = (load_checkpoint(latest_checkpoint(run)) for run in (left, right))
    found = [key for key in ("counters", "cycle") if one[key] != other[key]]
    for section in ("networks", "optimizers"):
        for name, tensors in one[section].items():
            if tensors.keys() != other[section][name].keys():
                found.append(f"{section}/{name}")
                continue
            for key, tensor in tensors.items():
                if not torch.equal(tensor, other[section][name][key]):
                    found.append(f"{section}/{name}/{key}")
    return found


def main() -> None:
    """Parse the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--cycles", type=int, default=1500)
    parser.add_argument("--kind", default="fsdp2", choices=("none", "ddp", "fsdp1", "fsdp2"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="fewstep_chaos_") as name:
        root = Path(name)
        whole = write_recipe(root / "whole.yaml", root / "whole", options.cycles)
        killed = write_recipe(root / "killed.yaml", root / "killed", options.cycles)
        began = time.monotonic()
        finish(whole, options.kind, f"checkpoint.every={options.cycles}")
        print(f"uninterrupted: {time.monotonic() - began:.0f} s", flush=True)
        rng = random.Random(options.seed)
        moments = kill_again_and_again(killed, root / "killed", options.kind, options.kills, rng)
        finish(killed, options.kind, f"checkpoint.every={options.cycles}")
        wrong = differences(root / "whole", root / "killed")
    hits = ", ".join(f"{count} {what}" for what, count in moments.items())
    print(f"{options.kills} kills: {hits}; {time.monotonic() - began:.0f} s in all")
    if wrong:
        raise SystemExit(f"the runs differ in {len(wrong)} entries: {wrong[:5]}")
    print("the same weights, optimizers and counters as the uninterrupted run, bit for bit")


if __name__ == "__main__":
    main()
