"""Samples of several models side by side."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import interpolate

from fewstep.figures.theme import PIXEL_RATIO, Array, Picture, Theme, render

MAX_COLUMNS = 16
"""Samples drawn of one model; further ones are left out."""

TILE_PIXELS = 152
"""Side up to which small samples are enlarged, in picture pixels."""

MAX_TILE_PIXELS = 256
"""Side to which larger samples are reduced, in picture pixels."""


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

    light, dark = render(draw, width // PIXEL_RATIO, height // PIXEL_RATIO, layout=None)
    alt = f"Grid of samples. Rows: {'; '.join(tiles)}."
    alt += f" Columns: {', '.join(drawn)}." if drawn else ""
    caption = "Every column has the same noise, and the same class or prompt, in all rows."
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
