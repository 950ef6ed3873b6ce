"""What every process of a run was doing when, over a few cycles."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fewstep.figures.theme import DARK, Picture, Theme, render, short, style_axes
from fewstep.training.timeline import (
    DRIVER,
    Kind,
    Span,
    group_of,
    order_lanes,
    rank_of,
    union_seconds,
)

CYCLES = 3
"""Cycles drawn."""

MAX_RANKS = 16
"""Lanes drawn of one group; further ones are left out."""

WIDTH, TOP, BOTTOM, RIGHT, GAP = 960, 58, 44, 24, 9
"""Picture, and what surrounds the rows, in CSS pixels; `GAP` parts the groups."""

KIND_STYLES: dict[Kind, tuple[str, str, str]] = {
    "rollout": ("rollout", "#009e73", "#2fc79a"),
    "train": ("training", "#0072b2", "#4a9fe0"),
    "score": ("scoring", "#56b4e9", "#a9d9f7"),
    "hand_off": ("hand-over", "#d55e00", "#f0824b"),
    "push": ("weight push", "#b3568a", "#dd9cc2"),
    "offload": ("offload", "#e6a117", "#f3c65a"),
    "save": ("saving", "#5b616b", "#b9bec7"),
    "validation": ("validation", "#a3a500", "#cfd05a"),
    "wait": ("waiting", "#d5d7db", "#454a53"),
}
"""Name of each kind, and its colour on a light and on a dark page."""


@dataclass(frozen=True)
class Rows:
    """Where each lane is drawn, in CSS pixels below the top of the rows.

    Attributes:
        top: upper edge of each lane.
        height: of a lane.
        total: height of all rows.
    """

    top: dict[str, float]
    height: float
    total: float


def steady_cycles(spans: Sequence[Span], count: int = CYCLES) -> list[int]:
    """The latest `count` consecutive cycles without saving or validation.

    Where there are none such, the latest consecutive ones, however few.
    """
    cycles = sorted({span.cycle for span in spans})
    busy = {span.cycle for span in spans if span.kind in ("save", "validation")}
    for last in reversed(cycles):
        stretch = range(last - count + 1, last + 1)
        if busy.isdisjoint(stretch) and set(stretch) <= set(cycles):
            return list(stretch)
    latest = cycles[-count:]
    return [cycle for i, cycle in enumerate(latest) if latest[-1] - cycle == len(latest) - 1 - i]


def timeline_picture(run: str, spans: Sequence[Span], cycles: int = CYCLES) -> Picture | None:
    """A few steady cycles: a row a process, groups together, coloured by what it did.

    Args:
        run: starts the name of the picture's file.
        spans: of any cycles, in any order.
        cycles: how many of them to draw.
    """
    chosen = steady_cycles(spans, cycles)
    drawn = [span for span in spans if span.cycle in chosen]
    if not drawn:
        return None
    lanes = order_lanes(drawn)
    shown = [lane for _, group in groupby(lanes, group_of) for lane in list(group)[:MAX_RANKS]]
    origin = min(span.start for span in drawn)
    drawn = [replace(s, start=s.start - origin) for s in drawn if s.lane in set(shown)]
    rows = _place(shown)
    height = round(TOP + rows.total + BOTTOM)

    def draw(figure: Figure, theme: Theme) -> None:
        _draw(figure, theme, drawn, rows, height)

    light, dark = render(draw, WIDTH, height, layout=None)
    which = f"Cycle {chosen[0]:,}"
    if len(chosen) > 1:
        which = f"Cycles {chosen[0]:,} to {chosen[-1]:,}"
    caption = f"{which}; a row is a process, and an empty stretch is time in which it waited."
    if len(shown) < len(lanes):
        caption += f" Of every group the first {MAX_RANKS} ranks."
    if any(span.name.startswith("fake_score/") for span in drawn):
        caption += " Numbers count the fake_score phases of a cycle."
    alt = _in_words(which, drawn)
    return Picture(f"{run}_timeline", light, dark, WIDTH, height, "Timeline", alt, caption)


def _in_words(which: str, spans: Sequence[Span]) -> str:
    """How long the cycles took, and how much of that each group was busy."""
    end = max(span.start + span.seconds for span in spans)
    said = []
    for group, lanes in groupby(order_lanes(spans), group_of):
        own = list(lanes)
        busy = sum(
            union_seconds(
                (s.start, s.start + s.seconds) for s in spans if s.lane == lane and s.kind != "wait"
            )
            for lane in own
        )
        share = busy / len(own) / end if end > 0 else 0.0
        ranks = "" if group == DRIVER else f" ({len(own)} {'row' if len(own) == 1 else 'rows'})"
        said.append(f"{group}{ranks} busy {share:.0%}")
    return f"{which} of the run, {short(end)} seconds: {'; '.join(said)}."


def _place(lanes: Sequence[str]) -> Rows:
    """Rows from the top down, lower where there are many."""
    height = min(22.0, max(9.0, 400 / len(lanes)))
    top, at = {}, 0.0
    for index, lane in enumerate(lanes):
        if index and group_of(lane) != group_of(lanes[index - 1]):
            at += GAP
        top[lane] = at
        at += height
    return Rows(top, height, at)


def _draw(figure: Figure, theme: Theme, spans: list[Span], rows: Rows, height: int) -> None:
    groups = {group: list(lanes) for group, lanes in groupby(rows.top, group_of)}
    heads = {group: group if len(group) <= 16 else group[:15] + "…" for group in groups}
    ranked = any(len(lanes) > 1 for lanes in groups.values())
    left = 20 + 7.5 * max(map(len, heads.values())) + (22 if ranked else 0)
    wide = WIDTH - left - RIGHT
    axes = figure.add_axes(
        (left / WIDTH, BOTTOM / height, wide / WIDTH, rows.total / height),
    )
    style_axes(axes, theme)
    axes.grid(visible=False)
    # A picture of nothing but moments still needs an axis.
    end = max(max(span.start + span.seconds for span in spans), 1e-3)
    axes.set(xlim=(0, end), ylim=(rows.total, 0), yticks=[])
    pixel = end / wide
    _draw_groups(axes, theme, groups, heads, rows)
    _draw_spans(axes, theme, spans, rows, pixel)
    _draw_cycles(axes, theme, spans, pixel)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=(1, 2, 2.5, 5, 10)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_xlabel("seconds", fontsize=9, color=theme.muted)
    present = {span.kind for span in spans}
    figure.legend(
        handles=[
            Patch(color=_colour(theme, kind), label=name)
            for kind, (name, _, _) in KIND_STYLES.items()
            if kind in present
        ],
        loc="upper left",
        bbox_to_anchor=(4 / WIDTH, 1 - 2 / height),
        ncols=len(KIND_STYLES),
        frameon=False,
        fontsize=9.5,
        labelcolor=theme.ink,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.4,
        borderaxespad=0,
    )


def _colour(theme: Theme, kind: Kind) -> str:
    return KIND_STYLES[kind][2 if theme is DARK else 1]


def _draw_groups(
    axes: Axes, theme: Theme, groups: dict[str, list[str]], heads: dict[str, str], rows: Rows
) -> None:
    """Names of the groups, and of as many of their ranks as there is room for."""
    beside = axes.get_yaxis_transform()
    wide = axes.get_position().width * WIDTH
    left = axes.get_position().x0 * WIDTH
    for group, lanes in groups.items():
        top, bottom = rows.top[lanes[0]], rows.top[lanes[-1]] + rows.height
        axes.axhspan(top, bottom, color=theme.rule, alpha=0.4, linewidth=0)
        name = axes.text((8 - left) / wide, (top + bottom) / 2, heads[group], transform=beside)
        name.set(fontsize=10, weight="bold", color=theme.ink, va="center")
        every = -(-13 // int(rows.height))
        for lane in lanes[::every] if len(lanes) > 1 else []:
            middle = rows.top[lane] + rows.height / 2
            rank = axes.text(-7 / wide, middle, str(rank_of(lane)), transform=beside)
            rank.set(fontsize=8, color=theme.muted, ha="right", va="center")


def _draw_spans(axes: Axes, theme: Theme, spans: list[Span], rows: Rows, pixel: float) -> None:
    """Bars, a pixel wide at least; shorter ones lie on top of those around them."""
    ordered = sorted(spans, key=lambda span: -span.seconds)
    inset = min(2.0, rows.height / 8)
    corners = []
    for span in ordered:
        low, high = rows.top[span.lane] + inset, rows.top[span.lane] + rows.height - inset
        # A gap of a pixel parts neighbours of one colour.
        end = span.start + max(span.seconds - pixel, 1.2 * pixel)
        corners.append([(span.start, low), (end, low), (end, high), (span.start, high)])
    colours = [_colour(theme, span.kind) for span in ordered]
    bars = PolyCollection(corners, facecolors=colours, zorder=2)
    bars.set(linewidth=0, clip_on=False)
    axes.add_collection(bars, autolim=False)
    if rows.height >= 14:
        for span, text in _names(ordered, pixel):
            middle = span.start + span.seconds / 2, rows.top[span.lane] + rows.height / 2
            red, green, blue = to_rgb(_colour(theme, span.kind))
            ink = "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else "#16181c"
            axes.text(*middle, text, ha="center", va="center_baseline", fontsize=7.5, color=ink)


def _names(spans: Sequence[Span], pixel: float) -> Iterator[tuple[Span, str]]:
    """What to write on which bars: the name, or its number, where there is room.

    There is where bars of the name are long enough on average, so that one kind of bar looks the
    same in every cycle, and where no shorter bar lies on this one.
    """
    alike: dict[tuple[str, str], list[float]] = {}
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        alike.setdefault((group_of(span.lane), span.name), []).append(span.seconds)
        lanes.setdefault(span.lane, []).append(span)
    for span in spans:
        mean = statistics.fmean(alike[group_of(span.lane), span.name])
        for text in dict.fromkeys((span.name, span.name.rpartition("/")[2])):
            room = 5.6 * len(text) * pixel
            if mean > room + 6 * pixel and span.seconds > room:
                if not any(_covers(other, span, pixel) for other in lanes[span.lane]):
                    yield span, text
                break


def _covers(upper: Span, lower: Span, pixel: float) -> bool:
    """Whether one bar is drawn over another by more than a pixel."""
    end = min(upper.start + upper.seconds, lower.start + lower.seconds)
    common = end - max(upper.start, lower.start)
    return upper is not lower and upper.seconds <= lower.seconds and common > pixel


def _draw_cycles(axes: Axes, theme: Theme, spans: list[Span], pixel: float) -> None:
    """A line where each cycle begins, and its number above, where there is room."""
    free = -1.0
    for cycle in sorted({span.cycle for span in spans}):
        start = min(span.start for span in spans if span.cycle == cycle)
        axes.axvline(start, color=theme.muted, linewidth=0.9, zorder=1, clip_on=False)
        text = f"cycle {cycle:,}"
        end = start + (6 * len(text) + 10) * pixel
        if start < free or end > axes.get_xlim()[1] + RIGHT * pixel:
            continue
        free = end
        axes.annotate(
            text,
            (start, 1),
            (2, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=9,
            color=theme.muted,
            annotation_clip=False,
        )
