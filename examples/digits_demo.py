"""The main job, from nothing to a four-step student of handwritten digits, on a CPU.

Trains a teacher, distils it twice (each role with its own network; LoRA adapters on one base),
evaluates all three, writes a report, and exports the student to plain diffusers. Whatever is
finished already is reused. Run by `make demo`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console

import fewstep
from fewstep.checkpoint import complete_checkpoints
from fewstep.comparison import count_steps, evaluate_sources, write_comparison
from fewstep.export import DESCRIPTION
from fewstep.progress import training_progress
from fewstep.results import evaluation_table

ROOT = Path("runs/digits")
RECIPES = {
    name: Path(f"recipes/digits/{name}.yaml") for name in ("teacher", "student", "student_shared")
}
TEACHER_STEPS = (1, 2, 4, 8, 16, 50)
console = Console()


def train_or_reuse(name: str, recipe_file: Path) -> bool:
    """Train a recipe, go on with a run that was stopped, or reuse one; True if it trained."""
    recipe = fewstep.load_recipe(recipe_file)
    resume = bool(complete_checkpoints(Path(recipe.run_dir)))
    with training_progress(console, name, recipe.train.cycles) as on_cycle:
        run = fewstep.train(recipe, resume=resume, on_cycle=on_cycle)
    if run.cycles_run == 0:
        console.print(f"{name}: reusing {run.directory}, which is complete")
    if not run.complete:
        console.print(f"Stopped after cycle {run.cycle} and saved: run `make demo` to go on")
        sys.exit(130)
    return run.cycles_run > 0


def evaluate_or_reuse(changed: bool) -> dict:
    """Evaluate teacher and students and write the report, unless nothing has changed."""
    file = ROOT / "evaluation.json"
    if file.is_file() and (ROOT / "report.html").is_file() and not changed:
        console.print(f"evaluation: reusing {file}")
        return json.loads(file.read_text())
    sources = [fewstep.open_source(ROOT / name) for name in RECIPES]
    document, images = evaluate_sources(
        sources,
        steps=TEACHER_STEPS,
        on_result=lambda row: console.print(
            f"  {row['model']}, {count_steps(row['steps'])}: Fréchet distance "
            f"{row['frechet_distance']:.3g}, {row['seconds']:.1f} s",
            highlight=False,
        ),
    )
    write_comparison(ROOT, sources, document, images)
    return document


def export_or_reuse(changed: bool) -> Path:
    """Export the student and check it against plain diffusers, unless nothing has changed."""
    directory = ROOT / "export"
    if (directory / DESCRIPTION).is_file() and not changed:
        console.print(f"export: reusing {directory}")
        return directory
    fewstep.export_run(fewstep.open_run(ROOT / "student", None), directory)
    return directory


def main() -> None:
    """Run every step, saying what it does and how long it takes."""
    began = time.perf_counter()
    changed = False
    for name, recipe_file in RECIPES.items():
        console.rule(name)
        changed |= train_or_reuse(name, recipe_file)
    console.rule("evaluation")
    document = evaluate_or_reuse(changed)
    console.print(evaluation_table(document))
    console.rule("export")
    export = export_or_reuse(changed)
    console.rule(f"done in {time.perf_counter() - began:.0f} s")
    console.print(
        f"Report:      {ROOT / 'report.html'}  (pictures beside it)\n"
        f"Figures:     {ROOT / 'evaluation.json'}\n"
        f"Export:      {export}  (loads in plain diffusers; checked to give the same images)\n\n"
        f"Try next, after `source .venv/bin/activate`:\n"
        f"  fewstep sample {ROOT / 'student'} --classes 3,1,4,1,5 --out digits.png\n"
        f"  fewstep train recipes/digits/one_step.yaml\n"
        f"  fewstep inspect {ROOT / 'student_shared'}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    try:
        main()
    except (fewstep.UserError, fewstep.TrainingError) as error:
        console.print("[bold red]Error:[/bold red]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, fewstep.UserError) else 1)
    except KeyboardInterrupt:
        console.print("Interrupted; what was saved before is untouched: run `make demo` to go on")
        sys.exit(130)
