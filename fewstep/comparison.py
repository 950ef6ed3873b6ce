"""Teachers and students side by side: the same noise and classes, measured and pictured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewstep.clip import ClipScore
from fewstep.data.items import Items
from fewstep.errors import UserError
from fewstep.evaluation import Evaluator, SampleMetrics
from fewstep.files import saving
from fewstep.report import write_report
from fewstep.report_data import distinct_runs
from fewstep.results import evaluation_document, result_row, write_evaluation
from fewstep.sampling import Samples
from fewstep.source import Source
from fewstep.validation import FeatureKind, build_evaluator

PICTURED = 16


def evaluate_sources(
    sources: Sequence[Source],
    *,
    steps: Sequence[int] = (),
    samples: int = 2000,
    seed: int = 0,
    dataset: Items | None = None,
    features: FeatureKind = "auto",
    clip: str | None = None,
    on_result: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sample every source with the same noise and classes, and measure.

    Args:
        sources: what to evaluate.
        steps: step counts for sources that can be sampled at any; students have their own.
        samples: how many of each.
        seed: of the noise.
        dataset: real data; by default that of the sources.
        features: what images are compared by.
        clip: a CLIP model, as a directory or hub id, that says how images fit their prompts.
        on_result: called with each row as it is done.

    Returns:
        The evaluation document, and the first 16 samples by "<name>, <n> steps". A row whose
        samples are not finite has no figures.

    Raises:
        UserError: where the sources have no real data to be compared with, or different ones, or
            no samples are finite, or the CLIP model cannot be loaded.
    """
    sources, first = _with_prompts(sources)
    real = dataset if dataset is not None else _load_data(first)
    model, device = first.roles.model, first.roles.device
    evaluator = build_evaluator(real, model, features, first.data.name, device)
    score = ClipScore(clip) if clip is not None else None
    if evaluator is None and score is None:
        raise UserError(
            f"data.name is {first.data.name!r}: prompts alone, no images to compare; give a CLIP "
            f"model (--clip), to see how images fit their prompts"
        )
    for source in sources:  # before the first of them is sampled
        source.conditions(1)
    rows: list[dict[str, Any]] = []
    images: dict[str, Tensor] = {}
    for name, source in zip(distinct_names(sources), sources, strict=True):
        for count in (None,) if source.few_step or not steps else steps:
            spec = source.sampler(count)
            made = source.sample(source.conditions(samples), spec, seed)
            figures = _measure(made, evaluator, score)
            rows.append(result_row(name, spec.steps, spec.nfe, made.seconds, *figures))
            # Thousands of large ones would not fit beside each other.
            images[f"{name}, {count_steps(spec.steps)}"] = made.images[:PICTURED].clone()
            on_result(rows[-1])
    if not any(map(has_figures, rows)):
        names = ", ".join(dict.fromkeys(row["model"] for row in rows))
        raise UserError(f"the samples of {names} are not finite")
    return evaluation_document(rows, evaluator.floor() if evaluator else None), images


def _measure(
    made: Samples, evaluator: Evaluator | None, score: ClipScore | None
) -> tuple[SampleMetrics | None, float | None]:
    """How samples compare with the real data, and fit their prompts; neither if not finite."""
    if not torch.isfinite(made.images).all():
        return None, None
    prompts = made.conditions.prompts
    return (
        evaluator.evaluate(made.images, made.labels) if evaluator is not None else None,
        score(made.images, prompts) if score is not None and prompts is not None else None,
    )


def has_figures(row: Mapping[str, Any]) -> bool:
    """Whether a row of results has any: those of samples that are not finite do not."""
    return "frechet_distance" in row or "clip_score" in row


def _with_prompts(sources: Sequence[Source]) -> tuple[list[Source], Source]:
    """The sources, exports with the prompts of a run beside them; and whose data they share.

    Raises:
        UserError: where they were trained on different data.
    """
    known = [source for source in sources if source.data.name != "none"] or list(sources)
    for other in known[1:]:
        check_same_data(known[0], other)
    items = known[0].items
    if items is None or len(known) == len(sources):
        return list(sources), known[0]
    return [s if s.items is not None else replace(s, items=items) for s in sources], known[0]


def check_same_data(one: Source, other: Source) -> None:
    """Raise UserError where two sources are not judged by the same images and prompts."""
    contents = [source.data.content() for source in (one, other)]
    if None not in contents and contents[0] == contents[1]:
        return  # however their files are named
    # Only the encodings' rounding depends on dtype.
    left, right = ({**s.data.facts(), "dtype": None} for s in (one, other))
    different = [key for key in left | right if left.get(key) != right.get(key)]
    if different:
        key = different[0]
        how = (
            f"data.{key} is {left.get(key)!r} of {one.path} and {right.get(key)!r} of {other.path}"
        )
    elif None not in contents:
        how = f"{one.path} and {other.path} have files of the same names and other content"
    else:
        return
    raise UserError(f"the sources were trained on different data: {how}; evaluate them one by one")


def count_steps(steps: int) -> str:
    """The number of steps in words: "1 step", "4 steps"."""
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def distinct_names(sources: Sequence[Source]) -> list[str]:
    """The sources' names; with their parent's, or numbered, where two would be alike."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        names = [f"{source.path.parent.name}/{source.name}" for source in sources]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})"
        for i, name in enumerate(names)
    ]


def _load_data(source: Source) -> Items:
    # Samples of prompts are compared with the images of the same prompts.
    items = source.items if source.items is not None else source.data.load()
    if items is None:
        raise UserError(
            f"data.name is {source.data.name!r}: there is no real data to compare with; name it "
            f"in the recipe, pass it as dataset=, or evaluate an export beside its run"
        )
    return items


def write_comparison(
    out: Path | str,
    sources: Sequence[Source],
    document: dict[str, Any],
    images: Mapping[str, Tensor],
) -> Path:
    """Write evaluation.json, the report page and its pictures into a folder; the page's path.

    Args:
        out: the folder.
        sources: what was evaluated; runs among them are drawn with their curves.
        document: of `evaluate_sources`.
        images: of `evaluate_sources`.

    Raises:
        UserError: where the folder cannot be written.
    """
    out = Path(out)
    named: dict[Path, str] = {}  # a run and its teacher have the same curves
    for name, source in zip(distinct_names(sources), sources, strict=True):
        if (source.path / "metrics.jsonl").is_file():
            named.setdefault(source.path, name)
    runs = distinct_runs((name, path) for path, name in named.items())
    rows = comparison_rows(document, images)
    shown = sources[0].conditions(PICTURED)
    labels = [""] * PICTURED
    if shown.labels is not None:
        labels = [str(label) for label in shown.labels.tolist()]
    elif shown.prompts is not None:
        labels = list(shown.prompts)
    pictured = all(image.ndim == 4 for image in rows.values())
    with saving(out):
        write_evaluation(out / "evaluation.json", document)
        return write_report(
            out,
            title=f"Few-step sampling: {out.name}",
            runs=runs,
            evaluation=document,
            grids={"comparison": rows} if pictured else {},
            labels=labels,
        )[0]


def comparison_rows(document: Mapping[str, Any], images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pictures' rows: teachers at their most steps and at the students' number, students.

    Returns:
        Row label -> images, teachers before students, most steps first.
    """
    results = document["results"]
    counts: dict[str, list[int]] = {}
    for row in results:
        counts.setdefault(row["model"], []).append(row["steps"])
    wanted = {steps[0] for steps in counts.values() if len(steps) == 1}
    chosen = [
        (len(counts[row["model"]]) == 1, -row["steps"], label)
        for row, label in zip(results, images, strict=True)
        if row["steps"] in wanted or row["steps"] == max(counts[row["model"]])
    ]
    return {label: images[label] for _, _, label in sorted(chosen)}
