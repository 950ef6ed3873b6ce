"""The digits' student on a local Ray cluster: in one trainer group, then in two.

Two workers train it with all roles in one group. Two more runs train it in two groups that take
turns (a critic of fake and teacher score, an actor of the student), with rollout workers that make
the student's samples, and in one process in the same order of phases. All are evaluated, and each
run on Ray must be as good as the one in one process. Run by `make demo-ray`; whatever is finished
already is reused. `--short` trains next to nothing, on one
worker, to see that all of it works.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_demo import TEACHER, call
from rich.console import Console
from rich.table import Table

ROOT = Path("runs/digits/ray")
STUDENT = "recipes/digits/student.yaml"
ON_RAY = ["launch.kind=ray", "launch.processes=2"]
# Groups train in their order, so the fake score comes first in a cycle: in one process as well.
FAKE_SCORE_FIRST = ["cycle.order=fake_score_first"]
GROUPS = "placement.groups={critic: [fake_score, teacher_score], actor: [student, student_ema]}"
# Rounding lets runs of hundreds of updates drift apart by a few per cent.
LARGEST_RATIO = 1.1
SHORT = {
    TEACHER: ["train.cycles=1", "train.batch_size=8", "model.network.num_layers=1"],
    STUDENT: [
        *("train.cycles=3", "cycle.warmup_cycles=1", "train.batch_size=8", "validation=null"),
        "launch.processes=1",
    ],
}
console = Console()


@dataclass(frozen=True)
class Trained:
    """A run of the student: where it is, how it differs from the recipe, what it must equal."""

    directory: Path
    overrides: tuple[str, ...] = ()
    equals: str | None = None

    @property
    def name(self) -> str:
        """As in an evaluation."""
        return self.directory.name


RUNS = (
    Trained(Path("runs/digits/student")),
    Trained(ROOT / "one_group", (*ON_RAY,), "student"),
    Trained(ROOT / "fake_first", (*FAKE_SCORE_FIRST,)),
    Trained(ROOT / "two_groups", (*ON_RAY, *FAKE_SCORE_FIRST, GROUPS), "fake_first"),
)


def train(run: Trained, short: list[str]) -> None:
    """Show the plan of a run on Ray; train it, or go on with it."""
    console.rule(f"{run.name}: {'Ray' if run.equals else 'one process'}")
    if run.equals:
        call("plan", STUDENT, *run.overrides, *short)
    call(
        *("train", STUDENT, *run.overrides, *short),
        *("--run-dir", str(run.directory), "--resume", "auto"),
    )


def ratios(document: Mapping[str, Any]) -> Iterator[tuple[Trained, float, float]]:
    """Each run on Ray with its Fréchet distance and that of the run in one process."""
    distances = {row["model"]: row["frechet_distance"] for row in document["results"]}
    for run in RUNS:
        if run.equals:
            yield run, distances[run.name], distances[run.equals]


def compare(document: Mapping[str, Any]) -> bool:
    """Print the distances side by side; whether all are close enough."""
    table = Table(title="Fréchet distance on Ray and in one process")
    table.add_column("on Ray")
    table.add_column("FD", justify="right")
    table.add_column("in one process")
    table.add_column("FD", justify="right")
    table.add_column("ratio", justify="right")
    close = True
    for run, on_ray, alone in ratios(document):
        ratio = on_ray / alone
        fits = 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO
        shown = f"{ratio:.3f}" if fits else f"[bold red]{ratio:.3f}[/bold red]"
        table.add_row(run.name, f"{on_ray:.4g}", run.equals, f"{alone:.4g}", shown)
        close = close and fits
    console.print(table)
    return close


def main(short: bool) -> None:
    """Train in one process and on Ray, evaluate, compare, show where the time went."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    console.rule("teacher: one process")
    call("train", TEACHER, *(SHORT[TEACHER] if short else []), "--resume", "auto")
    for run in RUNS:
        train(run, SHORT[STUDENT] if short else [])
    console.rule("evaluation")
    few = ["--samples", "64"] if short else []
    call("evaluate", *(str(run.directory) for run in RUNS), "--out", str(ROOT), *few)
    close = compare(json.loads((ROOT / "evaluation.json").read_text()))
    console.rule(f"done in {time.perf_counter() - began:.0f} s")
    console.print(
        f"Timeline:    {ROOT / 'two_groups_timeline.png'}  (what every process did when)\n"
        f"Report:      {ROOT / 'report.html'}\n"
        f"Trace:       {ROOT / 'two_groups/timeline.json'}  (for https://ui.perfetto.dev)\n\n"
        f"Try next:\n"
        f"  fewstep inspect {ROOT / 'two_groups'}\n"
        f"  fewstep plan {ROOT / 'two_groups/recipe.yaml'} rollout.schedule=async",
        highlight=False,
        soft_wrap=True,
    )
    if not close:
        limit = f"{LARGEST_RATIO - 1:.0%}"
        console.print(f"[bold red]A distance differs by more than {limit}.[/bold red]")
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(short=sys.argv[1:] == ["--short"])
    except KeyboardInterrupt:
        console.print("Interrupted; what was saved before is untouched: the same command goes on")
        sys.exit(130)
