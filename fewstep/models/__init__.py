"""Network families. A new one is one file here and one line in `FAMILIES`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fewstep.models.dit import DiTSettings
from fewstep.models.mixture import MixtureSettings
from fewstep.models.module import ModuleSettings

FAMILIES = {
    "dit": DiTSettings,
    "mixture": MixtureSettings,
    "module": ModuleSettings,
}

ModelSettings = Annotated[
    DiTSettings | MixtureSettings | ModuleSettings, Field(discriminator="family")
]
