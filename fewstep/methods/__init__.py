"""Methods. A new one is one file here and one line in `METHODS`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fewstep.methods.dmd2_settings import DMD2Settings
from fewstep.methods.flow_matching import FlowMatchingSettings

METHODS = {
    "flow_matching": FlowMatchingSettings,
    "dmd2": DMD2Settings,
}

MethodSettings = Annotated[FlowMatchingSettings | DMD2Settings, Field(discriminator="name")]
