"""Quality against cost: Fréchet distance over network calls and over sampling time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fewstep.figures.theme import (
    Picture,
    Theme,
    log_axis,
    number,
    render,
    short,
    spans_decades,
    style_axes,
)

Point = tuple[float, float, object]


def quality_picture(
    results: Sequence[Mapping[str, Any]],
    floor: Mapping[str, Any],
    colours: Mapping[str, int | None],
) -> Picture | None:
    """Fréchet distance against NFE, and against sampling time where that was measured.

    Args:
        results: One mapping per model and number of steps.
        floor: The same metrics of real images, the level no model is expected to pass.
        colours: Index of each model's colour; `None` is the teacher's.
    """
    level = number(floor.get("frechet_distance"))
    curves = {
        axis: {model: _points(results, model, axis) for model in colours}
        for axis in ("nfe", "seconds")
    }
    drawn = {axis: lines for axis, lines in curves.items() if any(lines.values())}
    if not drawn:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        panels = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
        for axes, (axis, lines) in zip(panels, drawn.items(), strict=True):
            _draw_quality(axes, axis, lines, level, colours, theme)
        panels[0].set_ylabel("Fréchet distance", fontsize=10, color=theme.ink)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="outside upper left",
            ncols=4,
            frameon=False,
            fontsize=10,
            labelcolor=theme.ink,
        )

    said = [
        f"{model}, {steps} steps: {short(y)}"
        for model, points in next(iter(drawn.values())).items()
        for _, y, steps in points
    ]
    said += [] if level is None else [f"floor: {short(level)}"]
    alt = f"Fréchet distance against network calls and sampling time. {'; '.join(said)}."
    caption = (
        "Numbers at the points are sampling steps; NFE is network calls a sample. "
        "Low and to the left is better."
    )
    width, height = 480 * len(drawn), 370
    light, dark = render(draw, width, height)
    return Picture("quality", light, dark, width, height, "Quality against cost", alt, caption)


def _points(results: Sequence[Mapping[str, Any]], model: str, axis: str) -> list[Point]:
    """Cost, Fréchet distance and steps of one model's results, by rising cost."""
    points = [
        (number(row.get(axis)), number(row.get("frechet_distance")), row.get("steps", "?"))
        for row in results
        if row.get("model") == model
    ]
    kept = [(x, y, steps) for x, y, steps in points if x is not None and y is not None and x > 0]
    return sorted(kept, key=lambda point: point[0])


def _draw_quality(
    axes: Axes,
    axis: str,
    lines: Mapping[str, Sequence[Point]],
    floor: float | None,
    colours: Mapping[str, int | None],
    theme: Theme,
) -> None:
    for model, points in lines.items():
        index = colours[model]
        colour = theme.series_colour(index)
        marker = "o" if index is None else "sD^v"[index % 4]
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, marker=marker, color=colour, linewidth=1.7, markersize=7, label=model)
        offset = (-12, -13) if index is not None and index % 2 == 0 else (6, 5)
        for cost, distance, steps in points:
            text = axes.annotate(str(steps), (cost, distance), offset, textcoords="offset points")
            text.set(color=colour, fontsize=9, zorder=5)
    points = [point for line in lines.values() for point in line]
    costs = np.array([cost for cost, _, _ in points])
    levels = np.array([y for _, y, _ in points] + ([] if floor is None else [floor]))
    if floor is not None:
        axes.axhline(
            floor,
            color=theme.muted,
            linewidth=1.3,
            linestyle=(0, (1, 2)),
            label="floor, real images",
        )
    if axis == "nfe":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        log_axis(axes, "x", costs)
    if spans_decades(levels):
        log_axis(axes, "y", levels)
    else:
        axes.set_ylim(bottom=0)
    style_axes(axes, theme)
    title = "network calls a sample (NFE)" if axis == "nfe" else "sampling time, seconds"
    axes.set_xlabel(title, fontsize=9, color=theme.muted)
