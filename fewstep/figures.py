"""Pictures of a run and of its evaluation, drawn off screen.

Each function turns plain numbers into a `Picture`: one PNG for light pages, one for dark pages, and
words that say the same. Figures are built directly on the Agg canvas with explicit colours, so
neither pyplot, nor the global backend, nor `rcParams` is touched. Functions return `None` when
there is nothing to draw.
"""

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""The lines of a metrics.jsonl file, by their `series`."""

Array = NDArray[np.float64]

PIXEL_RATIO = 2
"""Picture pixels per CSS pixel: sharp on a dense screen, and halved cleanly on another."""

MAX_COLUMNS = 16
ROUND_STEPS = (1, 2, 2.5, 5, 10)
TILE_PIXELS = 152
MAX_TILE_PIXELS = 256


@dataclass(frozen=True)
class Theme:
    """Colours of one colour scheme. The series colours follow Okabe and Ito's palette."""

    surface: str
    ink: str
    muted: str
    rule: str
    teacher: str
    series: tuple[str, ...]

    def series_colour(self, index: int | None) -> str:
        """Colour of a series: the teacher's neutral for `None`, else the palette's, in turn."""
        return self.teacher if index is None else self.series[index % len(self.series)]


LIGHT = Theme(
    surface="#ffffff",
    ink="#23262b",
    muted="#666c75",
    rule="#e6e7ea",
    teacher="#5b616b",
    series=("#0072b2", "#d55e00", "#009e73", "#b3568a"),
)
DARK = Theme(
    surface="#1d2025",
    ink="#e7e8ea",
    muted="#a0a6b0",
    rule="#33373e",
    teacher="#b9bec7",
    series=("#56b4e9", "#f0a04b", "#2fc79a", "#dd9cc2"),
)


@dataclass(frozen=True)
class Picture:
    """One picture: the file's stem, a PNG for either scheme, its size in CSS pixels, and words."""

    name: str
    light: bytes
    dark: bytes
    width: int
    height: int
    title: str
    alt: str
    caption: str = ""


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


def number(value: object) -> float | None:
    """A finite float, or `None` for anything else (NaN, null, text, a bool)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if math.isfinite(value) else None


def short(value: float | None) -> str:
    """A number as a reader wants it: three significant digits, no needless exponent."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


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


LOWER_IS_BETTER = ("frechet_distance", "kernel_distance")
HIGHER_IS_BETTER = ("class_accuracy", "precision", "recall", "density", "coverage")


def validation_picture(run: str, records: Records) -> Picture | None:
    """Up to three validation metrics over cycles, the best value of each marked."""
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


def metric_name(key: str) -> str:
    """A metric's key in words."""
    special = {"frechet_distance": "Fréchet distance", "nfe": "NFE", "seconds": "Seconds"}
    return special.get(key, key.replace("_", " ").capitalize())


def _role_curves(run: str, records: Records, key: str, title: str, stem: str) -> Picture | None:
    panels = []
    for colour, role in enumerate(("student", "fake_score")):
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
    light, dark = _render(draw, width, height)
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
    if _spans_decades(panel.y):
        _log_axis(axes, "y", panel.y)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
        axes.margins(y=0.12)
    if panel.best is not None:
        at = panel.x[panel.best], panel.y[panel.best]
        axes.plot(*at, "o", color="none", markeredgecolor=theme.ink, markersize=10, clip_on=False)
    _style(axes, theme)
    axes.set_title(panel.title, loc="left", fontsize=10, color=theme.ink, pad=6)
    if panel.best is not None:
        text = f"best {short(float(panel.y[panel.best]))} at cycle {panel.x[panel.best]:,.0f}"
        axes.set_title(text, loc="right", fontsize=9, color=theme.muted, pad=6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=ROUND_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


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
    light, dark = _render(draw, width, height)
    return Picture("quality", light, dark, width, height, "Quality against cost", alt, caption)


Point = tuple[float, float, object]


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
        _log_axis(axes, "x", costs)
    if _spans_decades(levels):
        _log_axis(axes, "y", levels)
    else:
        axes.set_ylim(bottom=0)
    _style(axes, theme)
    title = "network calls a sample (NFE)" if axis == "nfe" else "sampling time, seconds"
    axes.set_xlabel(title, fontsize=9, color=theme.muted)


def grid_picture(
    name: str, rows: Mapping[str, Tensor], labels: Sequence[str]
) -> tuple[Picture, list[str]] | None:
    """Samples of several models side by side, pixels kept crisp.

    Args:
        name: Stem of the picture's file.
        rows: Images [N, C, H, W] in [-1, 1] by row label; C is 1 or 3.
        labels: Class of each column.

    Returns:
        The picture, and the labels of the columns drawn.
    """
    tiles = {label: _tiles(name, label, images) for label, images in rows.items()}
    tiles = {label: strip for label, strip in tiles.items() if len(strip)}
    if not tiles:
        return None
    columns = max(len(strip) for strip in tiles.values())
    side_y = max(strip.shape[1] for strip in tiles.values())
    side_x = max(strip.shape[2] for strip in tiles.values())
    drawn = [str(label) for label in labels[:columns]]
    heads = {label: _row_label(label) for label in tiles}
    longest = max(
        len(line) for text in heads.values() for part in text for line in part.split("\n")
    )
    gap, left, top = 12, 32 + 17 * longest, 52 if drawn else 12
    width = left + columns * (side_x + gap)
    height = top + len(tiles) * (side_y + gap)
    width, height = width + width % 2, height + height % 2

    def draw(figure: Figure, theme: Theme) -> None:
        for row, (label, strip) in enumerate(tiles.items()):
            y = height - top - row * (side_y + gap) - side_y
            strong, quiet = heads[label]
            middle = (y + side_y / 2) / height
            at = "bottom" if quiet else "center"
            figure.text(
                4 / width, middle, strong, va=at, fontsize=10.5, weight="bold", color=theme.ink
            )
            figure.text(
                4 / width, middle - 4 / height, quiet, va="top", fontsize=9.5, color=theme.muted
            )
            for column, tile in enumerate(strip):
                figure.figimage(tile, left + column * (side_x + gap), y, origin="upper")
        room = max(3, int(side_x / 13))
        for column, label in enumerate(drawn):
            text = label if len(label) <= room else label[: room - 1] + "…"
            x = (left + column * (side_x + gap) + side_x / 2) / width
            y = (height - top + 14) / height
            figure.text(x, y, text, ha="center", fontsize=10, color=theme.muted)

    light, dark = _render(draw, width // PIXEL_RATIO, height // PIXEL_RATIO, layout=None)
    alt = f"Grid of samples. Rows: {'; '.join(tiles)}."
    alt += f" Columns: {', '.join(drawn)}." if drawn else ""
    caption = "Every column starts from the same noise and class in all rows."
    total = max(len(images) for images in rows.values())
    if total > columns:
        caption += f" The first {columns} of {total} columns."
    size = width // PIXEL_RATIO, height // PIXEL_RATIO
    title = name.replace("_", " ").capitalize()
    return Picture(name, light, dark, *size, title, alt, caption), drawn


def _row_label(label: str) -> tuple[str, str]:
    """Split "student, 4 steps" into a strong name and a quiet remainder, both wrapped."""
    head, _, rest = label.partition(", ")
    strong = textwrap.wrap(head, 16, max_lines=2, placeholder="…")
    quiet = textwrap.wrap(rest, 18, max_lines=2, placeholder="…")
    return "\n".join(strong), "\n".join(quiet)


def _tiles(grid: str, row: str, images: Tensor) -> Array:
    """Images [N, C, H, W] in [-1, 1] as RGB [n, H', W', 3] in [0, 1], enlarged by whole pixels.

    A pixel that is not finite becomes magenta, so that it cannot pass for a dark one.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"grid {grid!r}, row {row!r}: images must have shape [N, 1 or 3, H, W], "
            f"got {list(images.shape)}"
        )
    pixels = images[:MAX_COLUMNS].detach().float().cpu()
    longest = max(pixels.shape[2:])
    if longest > MAX_TILE_PIXELS:
        pixels = interpolate(pixels, scale_factor=MAX_TILE_PIXELS / longest, mode="area")
    times = max(1, TILE_PIXELS // longest)
    pixels = pixels.repeat_interleave(times, 2).repeat_interleave(times, 3)
    pixels = ((pixels + 1) / 2).clamp(0, 1).expand(-1, 3, -1, -1)
    rgb: Array = pixels.permute(0, 2, 3, 1).double().numpy().copy()
    rgb[~np.isfinite(rgb).all(-1)] = (1.0, 0.0, 1.0)
    return rgb


def _spans_decades(values: Array) -> bool:
    """Whether a logarithmic axis serves better: positive values over more than a decade."""
    return bool(len(values)) and float(values.min()) > 0 and values.max() / values.min() > 12


def _log_axis(axes: Axes, which: str, values: Array) -> None:
    """Logarithmic scale with plain numbers, at 1, 2 and 5 of each decade if there are few."""
    few = values.max() / values.min() < 300
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _style(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.surface)
    axes.grid(axis="y", color=theme.rule, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.muted)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=theme.muted)


def _render(
    draw: Callable[[Figure, Theme], None],
    width: int,
    height: int,
    layout: Any = "constrained",
) -> tuple[bytes, bytes]:
    """Draw one figure for a light and for a dark page; width and height in CSS pixels."""
    images = []
    for theme in (LIGHT, DARK):
        dots = 96 * PIXEL_RATIO
        size = (width * PIXEL_RATIO / dots, height * PIXEL_RATIO / dots)
        figure = Figure(figsize=size, dpi=dots, facecolor=theme.surface, layout=layout)
        canvas = FigureCanvasAgg(figure)
        draw(figure, theme)
        buffer = io.BytesIO()
        canvas.print_figure(buffer, format="png", facecolor=theme.surface)
        images.append(buffer.getvalue())
    return images[0], images[1]
