"""Text to image, from nothing to a four-step student, on a CPU: emoji by their names.

Gets 1,026 emoji, encodes their names with a real text encoder, trains a small network of Stable
Diffusion 3's kind on 926 of them, distils it, evaluates both with prompts that were trained on and
with those held out, writes a report, and exports the student. Whatever is finished already is
reused. Run by `make emoji`. `--short` trains next to nothing, to see that all of it works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from distributed_demo import call
from rich.console import Console
from torch import Tensor

import fewstep
from fewstep.comparison import count_steps
from fewstep.data.conditions import item_conditions, tensor_conditions
from fewstep.data.items import Items
from fewstep.evaluation import Evaluator
from fewstep.features import ColourFeatures
from fewstep.methods.method import SamplerSpec
from fewstep.report import ReportRun, write_report
from fewstep.results import evaluation_document, evaluation_table, result_row, write_evaluation
from fewstep.source import Source
from fewstep.validation import real_images

ROOT, DATA = Path("runs/emoji"), Path("data/emoji")
TEACHER, STUDENT = "recipes/emoji/teacher.yaml", "recipes/emoji/student.yaml"
# The teacher is guided, which takes two network calls a step: 50, 16, 8 and 4 of them.
TEACHER_STEPS = (25, 8, 4, 2)
# Short enough to be read above a picture.
PICTURED = {
    "train": ("red heart", "frog", "octopus", "banana", "rocket", "snowman", "nerd face", "fire"),
    "validation": ("pizza", "hamster", "bell", "dog face", "cloud", "hot dog", "bird", "pill"),
}
SHORT = {
    TEACHER: ["train.cycles=1", "train.batch_size=4", "model.network.num_layers=1"],
    STUDENT: ["train.cycles=2", "train.batch_size=4", "cycle.warmup_cycles=1"],
}
SHORT_STEPS = (2, 1)
console = Console()


def own_picture(images: Tensor, real: Tensor) -> float:
    """Share of images whose nearest real one is that of their own prompt.

    Args:
        images: [N, C, H, W], made for the prompts of the real ones in their order.
        real: [N, C, H, W].
    """
    nearest = torch.cdist(images.flatten(1), real.flatten(1)).argmin(1)
    return float((nearest == torch.arange(len(real))).double().mean())


def samplers(source: Source, teacher_steps: Sequence[int], guidance: float) -> list[SamplerSpec]:
    """How a source is sampled: a student in its own way, a teacher guided as it was for it."""
    if source.few_step:
        return [source.sampler(None)]
    return [replace(source.sampler(count), guidance=guidance) for count in teacher_steps]


def measure(source: Source, items: Items, specs: Sequence[SamplerSpec]) -> list[dict[str, Any]]:
    """Figures of a source, sampled in some ways: one sample for each item's prompt.

    Args:
        source: a teacher or a student.
        items: whose prompts it gets, and whose pictures it is compared with.
        specs: the ways.
    """
    real = real_images(items, source.roles.model)
    evaluator = Evaluator(real, None, ColourFeatures())
    conditions = item_conditions(items, torch.arange(len(items)))
    rows = []
    for spec in specs:
        made = source.sample(conditions, spec, seed=0)
        figures = evaluator.evaluate(made.images)
        row = result_row(source.name, spec.steps, spec.nfe, made.seconds, figures)
        rows.append({**row, "own_picture": own_picture(made.images, real)})
        console.print(
            f"  {source.name}, {count_steps(spec.steps)}, {len(items)} prompts: nearest picture is "
            f"its own for {rows[-1]['own_picture']:.0%}, {made.seconds:.0f} s",
            highlight=False,
        )
    return rows


def pictures(
    ways: Sequence[tuple[Source, Sequence[SamplerSpec]]], items: Items, prompts: Sequence[str]
) -> dict[str, Tensor]:
    """Rows of pictures of the same prompts from the same noise, below the real ones."""
    known = list(items.prompts or ())
    numbers = torch.tensor([known.index(prompt) for prompt in prompts])
    conditions = tensor_conditions(items.condition(numbers), prompts)
    rows = {"real": items.x0(numbers)}
    for source, specs in ways:
        for spec in specs:
            made = source.sample(conditions, spec, seed=0)
            rows[f"{source.name}, {count_steps(spec.steps)}"] = made.images
    return rows


def evaluate_or_reuse(teacher_steps: Sequence[int]) -> dict[str, Any]:
    """Evaluate teacher and student and write the report, unless that has been done since."""
    file = ROOT / "evaluation.json"
    newest = max(path.stat().st_mtime for path in ROOT.glob("*/checkpoints/*"))
    if file.is_file() and file.stat().st_mtime > newest:
        console.print(f"evaluation: reusing {file}")
        return json.loads(file.read_text())
    recipe = fewstep.load_recipe(TEACHER)
    data = {split: recipe.data.load(split) for split in PICTURED}
    sources = [fewstep.open_source(ROOT / name) for name in ("teacher", "student")]
    guidance = fewstep.load_recipe(STUDENT).method.guidance
    ways = [(source, samplers(source, teacher_steps, guidance)) for source in sources]
    found: dict[str, list] = {split: [] for split in data}
    for source, specs in ways:
        for split, items in data.items():
            found[split] += measure(source, items, specs)
    real = real_images(data["train"], sources[0].roles.model)
    floor = Evaluator(real, None, ColourFeatures()).floor()
    document = {**evaluation_document(found["train"], floor), "held_out": found["validation"]}
    names = {"train": "prompts that were trained on", "validation": "prompts that were held out"}
    runs = [ReportRun(source.name, source.path) for source in sources]
    write_report(
        ROOT,
        title="Emoji in four steps",
        runs=runs,
        evaluation=document,
        grids={names[s]: pictures(ways, data[s], prompts) for s, prompts in PICTURED.items()},
        labels={names[s]: prompts for s, prompts in PICTURED.items()},
    )
    write_evaluation(file, document)
    return document


def main(short: bool) -> None:
    """Run every step, saying what it does and how long it takes."""
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    began = time.perf_counter()
    console.rule("emoji")
    if not (DATA / "held_out/metadata.jsonl").is_file():
        done = subprocess.run([sys.executable, "recipes/emoji/fetch.py"], check=False)
        if done.returncode != 0:
            sys.exit(done.returncode)
    call("encode", TEACHER)
    for name, recipe in (("teacher", TEACHER), ("student", STUDENT)):
        console.rule(name)
        call("train", recipe, *(SHORT[recipe] if short else []), "--resume", "auto")
    console.rule("evaluation")
    document = evaluate_or_reuse(SHORT_STEPS if short else TEACHER_STEPS)
    console.print(evaluation_table(document))
    console.rule("export")
    call("export", str(ROOT / "student"), "--out", str(ROOT / "export"))
    console.rule(f"done in {time.perf_counter() - began:.0f} s")
    console.print(
        f"Report:      {ROOT / 'report.html'}  (pictures beside it)\n"
        f"Figures:     {ROOT / 'evaluation.json'}\n"
        f"Export:      {ROOT / 'export'}  (loads in plain diffusers)\n\n"
        f"Try next, after `source .venv/bin/activate`:\n"
        f"  fewstep sample {ROOT / 'student'} --prompt 'blue heart' --prompt 'a sad pumpkin' "
        f"--out emoji.png",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    try:
        main(short=sys.argv[1:] == ["--short"])
    except fewstep.UserError as error:
        console.print("[bold red]Error:[/bold red]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("Interrupted; what was saved before is untouched: run `make emoji` to go on")
        sys.exit(130)
