"""What all pictures share: colours, axes, numbers in words, and drawing to PNG."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""Plain numbers, of any shape."""

PIXEL_RATIO = 2
"""Picture pixels per CSS pixel: sharp on a dense screen, and halved cleanly on another."""


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


def spans_decades(values: Array) -> bool:
    """Whether a logarithmic axis serves better: positive values over more than a decade."""
    return bool(len(values)) and float(values.min()) > 0 and values.max() / values.min() > 12


def log_axis(axes: Axes, which: str, values: Array) -> None:
    """Logarithmic scale with plain numbers, at 1, 2 and 5 of each decade if there are few."""
    few = values.max() / values.min() < 300
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def style_axes(axes: Axes, theme: Theme) -> None:
    """Quiet axes: one line at the bottom, faint horizontal rules, no ticks."""
    axes.set_facecolor(theme.surface)
    axes.grid(axis="y", color=theme.rule, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.muted)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=theme.muted)


def render(
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
