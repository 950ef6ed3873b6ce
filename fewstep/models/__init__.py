"""Network families. A new one is one file here and one line in `FAMILIES`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fewstep.models.dit import DiTSettings
from fewstep.models.mixture import MixtureSettings
from fewstep.models.module import ModuleSettings
from fewstep.models.sd3 import SD3Settings

FAMILIES = {
    "dit": DiTSettings,
    "mixture": MixtureSettings,
    "module": ModuleSettings,
    "sd3": SD3Settings,
}

ModelSettings = Annotated[
    DiTSettings | MixtureSettings | ModuleSettings | SD3Settings, Field(discriminator="family")
]
