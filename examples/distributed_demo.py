"""Two ranks, killed in the middle, and the same result as without the kill.

Trains the digits' shared-base student on two processes with FSDP2, twice: once undisturbed, once
with a SIGKILL for all of its processes at a random moment, after which it is gone on with. Then
both are evaluated, and their figures must be equal. Run by `make demo-distributed`.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console

from fewstep.checkpoint import complete_checkpoints

ROOT = Path("runs/digits/distributed")
TEACHER, STUDENT = "recipes/digits/teacher.yaml", "recipes/digits/student_shared.yaml"
FEWSTEP = [sys.executable, "-m", "fewstep"]
ON_TWO_RANKS = ["launch.processes=2", "parallel.kind=fsdp2"]
console = Console()


def call(*arguments: str) -> None:
    """Run `fewstep`; leave with its exit code where it fails."""
    line = shlex.join(["fewstep", *arguments])
    console.print(f"$ {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
    code = subprocess.run([*FEWSTEP, *arguments], check=False).returncode
    if code != 0:
        sys.exit(code)


def train(run_dir: Path) -> None:
    """Train the student on two ranks, or go on with it."""
    call("train", STUDENT, *ON_TWO_RANKS, "--run-dir", str(run_dir), "--resume", "auto")


def train_and_kill(run_dir: Path) -> None:
    """Train until there is a checkpoint, and kill all processes a little later."""
    arguments = ["train", STUDENT, *ON_TWO_RANKS, "--run-dir", str(run_dir), "--resume", "auto"]
    process = subprocess.Popen([*FEWSTEP, *arguments], stdout=subprocess.DEVNULL)
    while not complete_checkpoints(run_dir):
        if process.poll() is not None:
            sys.exit(process.returncode)
        time.sleep(0.05)
    time.sleep(random.uniform(0, 5))
    parent = psutil.Process(process.pid)
    family = [*parent.children(recursive=True), parent]
    for member in family:
        member.kill()
    process.wait()
    psutil.wait_procs(family)
    newest = complete_checkpoints(run_dir)[-1].name
    console.print(
        f"Killed {len(family)} processes (SIGKILL); the newest checkpoint is {newest}.",
        highlight=False,
    )


def figures(directory: Path) -> dict:
    """What an evaluation has found, without how long it took and what it was called."""
    document = json.loads((directory / "evaluation.json").read_text())
    rows = [
        {key: value for key, value in row.items() if key not in ("seconds", "model")}
        for row in document["results"]
    ]
    return {**document, "results": rows}


def main() -> None:
    """Train, kill, go on, evaluate, compare."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    undisturbed, killed = ROOT / "undisturbed", ROOT / "killed"
    shutil.rmtree(ROOT, ignore_errors=True)
    console.rule("teacher (one process)")
    call("train", TEACHER, "--resume", "auto")
    console.rule("student on two ranks, undisturbed")
    train(undisturbed)
    console.rule("student on two ranks, killed")
    train_and_kill(killed)
    console.rule("student on two ranks, gone on with")
    train(killed)
    console.rule("evaluation")
    for run_dir in (undisturbed, killed):
        call("evaluate", str(run_dir), "--out", str(run_dir))
    if figures(undisturbed) != figures(killed):
        console.print("[bold red]The two evaluations differ.[/bold red]")
        sys.exit(1)
    console.rule(f"done in {time.perf_counter() - began:.0f} s")
    console.print(
        f"{killed / 'evaluation.json'} holds the same figures as "
        f"{undisturbed / 'evaluation.json'}: the kill has changed nothing.\n\n"
        f"Try next:\n"
        f"  fewstep inspect {killed}\n"
        f"  torchrun --nproc-per-node 2 -m fewstep train {STUDENT} parallel.kind=fsdp1 "
        f"--run-dir runs/digits/fsdp1",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
