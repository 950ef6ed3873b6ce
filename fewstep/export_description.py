"""What an export says of itself, for sampling and evaluating it."""

from __future__ import annotations

from pathlib import Path
from typing import final

from fewstep.diffusion.samplers import Transition
from fewstep.errors import UserError
from fewstep.models import ModelSettings
from fewstep.models.sd3 import SD3Settings
from fewstep.settings import Settings

DESCRIPTION = "fewstep.json"
# Stands in the description for the export's own directory, wherever it is moved.
HERE = "."


@final
class ExportDescription(Settings):
    """What `fewstep.json` in an export says.

    Attributes:
        model: the recipe's model section.
        sigmas: the grid, as it was trained.
        solver: "renoise" or "euler".
        role: whose weights these are.
        cycle: after which they were saved.
        data: name of the data set to evaluate against.
    """

    model: ModelSettings
    sigmas: tuple[float, ...]
    solver: Transition
    role: str
    cycle: int
    data: str


def read_description(directory: Path) -> ExportDescription:
    """What an export says of itself; a pipeline's parts are where the export is now.

    Raises:
        UserError: where it cannot be read.
    """
    file = directory / DESCRIPTION
    try:
        description = ExportDescription.model_validate_json(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    model = description.model
    if isinstance(model, SD3Settings) and model.pipeline == HERE:
        model = model.model_copy(update={"pipeline": str(directory)})
    return description.model_copy(update={"model": model})
