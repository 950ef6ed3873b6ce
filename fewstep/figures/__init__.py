"""Pictures of a run and of its evaluation, drawn off screen.

Each function turns plain numbers into a `Picture`: one PNG for light pages, one for dark pages, and
words that say the same. Figures are built directly on the Agg canvas with explicit colours, so
neither pyplot, nor the global backend, nor `rcParams` is touched. Functions return `None` when
there is nothing to draw.
"""

from fewstep.figures.curves import (
    LOWER_IS_BETTER,
    Records,
    curve,
    gradient_norm_picture,
    latents_picture,
    loss_picture,
    metric_name,
    validation_picture,
)
from fewstep.figures.grid import grid_picture
from fewstep.figures.quality import quality_picture
from fewstep.figures.theme import DARK, LIGHT, Array, Picture, number, short
from fewstep.figures.timeline import timeline_picture

__all__ = [
    "DARK",
    "LIGHT",
    "LOWER_IS_BETTER",
    "Array",
    "Picture",
    "Records",
    "curve",
    "gradient_norm_picture",
    "grid_picture",
    "latents_picture",
    "loss_picture",
    "metric_name",
    "number",
    "quality_picture",
    "short",
    "timeline_picture",
    "validation_picture",
]
