"""Curves over training cycles: losses, gradient norms, latent statistics and validation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fewstep.evaluation import HIGHER_IS_BETTER
from fewstep.figures.theme import (
    Array,
    Picture,
    Theme,
    log_axis,
    number,
    render,
    short,
    spans_decades,
    style_axes,
)

Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""The lines of a metrics.jsonl file, by their `series`."""

LOWER_IS_BETTER = ("frechet_distance", "kernel_distance")
"""Metrics of samples that fall as the samples improve."""

ROUND_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Panel:
    """One set of axes over training cycles: a noisy line or a few marked points."""

    title: str
    x: Array
    y: Array
    colour: int = 0
    reference: float | None = None
    best: int | None = None
    marked: bool = False


def curve(records: Records, series: str, key: str) -> tuple[Array, Array]:
    """Cycles and values of one quantity, both [n], without the values that are not finite."""
    points = [
        (number(record.get("cycle", record.get("step", index))), number(record.get(key)))
        for index, record in enumerate(records.get(series, ()))
    ]
    kept = [(x, y) for x, y in points if x is not None and y is not None]
    pairs = np.array(kept, dtype=np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def smooth(values: Array) -> Array:
    """Centred running mean over about a fortieth of the values; one-sided at both ends."""
    half = len(values) // 80
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    means: Array = (total[high] - total[low]) / (high - low)
    return means


def metric_name(key: str) -> str:
    """A metric's key in words."""
    special = {"frechet_distance": "Fréchet distance", "nfe": "NFE", "seconds": "Seconds"}
    return special.get(key, key.replace("_", " ").capitalize())


def loss_picture(run: str, records: Records) -> Picture | None:
    """Loss of each trained role."""
    return _role_curves(run, records, "loss", "Loss", "loss")


def gradient_norm_picture(run: str, records: Records) -> Picture | None:
    """Gradient norm of each trained role, before clipping."""
    return _role_curves(run, records, "grad_norm", "Gradient norm", "gradient_norm")


def latents_picture(run: str, records: Records) -> Picture | None:
    """Statistics of the student's clean samples against the teacher's."""
    panels = []
    names = {
        "sample_mean": "mean",
        "sample_std": "standard deviation",
        "sample_variance": "variance within a sample",
    }
    for key, title in names.items():
        x, y = curve(records, "student", key)
        _, reference = curve(records, "reference", key)
        level = float(reference[-1]) if len(reference) else None
        if len(x):
            panels.append(Panel(f"Sample {title}", x, y, reference=level))
    caption = "Student's clean samples during training."
    if any(panel.reference is not None for panel in panels):
        caption += " Dashed: the teacher's samples."
    return _curves(f"{run}_latents", "Latent statistics", caption, panels)


def validation_picture(run: str, records: Records) -> Picture | None:
    """Up to two validation metrics over cycles, the best value of each marked."""
    present = {key for record in records.get("validation", ()) for key in record}
    known = [key for key in LOWER_IS_BETTER + HIGHER_IS_BETTER if key in present]
    known.sort(key=lambda key: key not in ("frechet_distance", "class_accuracy"))
    panels = []
    for key in known:
        x, y = curve(records, "validation", key)
        if len(x):
            lower = key in LOWER_IS_BETTER
            best = int(y.argmin() if lower else y.argmax())
            title = f"{metric_name(key)} ({'lower' if lower else 'higher'} is better)"
            panels.append(Panel(title, x, y, colour=2, best=best, marked=True))
    caption = "The ring marks the best value."
    return _curves(f"{run}_validation", "Validation", caption, panels[:2])


def _role_curves(run: str, records: Records, key: str, title: str, stem: str) -> Picture | None:
    panels = []
    for colour, role in enumerate(("student", "fake_score", "discriminator")):
        x, y = curve(records, role, key)
        if len(x):
            name = role.replace("_", " ").capitalize()
            panels.append(Panel(f"{name} {title.lower()}", x, y, colour))
    if len(panels) == 1:
        panels = [replace(panels[0], title=title)]
    return _curves(f"{run}_{stem}", title, "Faint: each step. Bold: running mean.", panels)


def _curves(name: str, title: str, caption: str, panels: Sequence[Panel]) -> Picture | None:
    if not panels:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(rows, panels, strict=True):
            _draw_panel(axes, panel, theme)
        rows[-1].set_xlabel("cycle", color=theme.muted, fontsize=9)
        figure.align_ylabels()

    said = [
        f"{panel.title}: from {short(float(smooth(panel.y)[0]))} to "
        f"{short(float(smooth(panel.y)[-1]))}"
        + ("" if panel.best is None else f", best {short(float(panel.y[panel.best]))}")
        + ("" if panel.reference is None else f", teacher {short(panel.reference)}")
        for panel in panels
    ]
    last = max(panel.x[-1] for panel in panels)
    alt = f"{title} up to cycle {last:,.0f}. {'; '.join(said)}."
    width, height = 410, 325
    light, dark = render(draw, width, height)
    return Picture(name, light, dark, width, height, title, alt, caption)


def _draw_panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    colour = theme.series_colour(panel.colour)
    if panel.marked or len(panel.x) < 3:
        axes.plot(panel.x, panel.y, "o-", color=colour, markersize=3.5, linewidth=1.6)
    else:
        axes.plot(panel.x, panel.y, color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(panel.x, smooth(panel.y), color=colour, linewidth=1.8)
    if panel.reference is not None:
        axes.axhline(panel.reference, color=theme.ink, linewidth=1.2, linestyle=(0, (5, 3)))
    if spans_decades(panel.y):
        log_axis(axes, "y", panel.y)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
        axes.margins(y=0.12)
    if panel.best is not None:
        at = panel.x[panel.best], panel.y[panel.best]
        axes.plot(*at, "o", color="none", markeredgecolor=theme.ink, markersize=10, clip_on=False)
    style_axes(axes, theme)
    axes.set_title(panel.title, loc="left", fontsize=10, color=theme.ink, pad=6)
    if panel.best is not None:
        text = f"best {short(float(panel.y[panel.best]))} at cycle {panel.x[panel.best]:,.0f}"
        axes.set_title(text, loc="right", fontsize=9, color=theme.muted, pad=6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=ROUND_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
