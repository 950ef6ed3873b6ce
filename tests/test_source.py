"""What can be sampled: which runs have steps of their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fewstep.methods.adversarial import AdversarialSettings
from fewstep.methods.dmd2 import DMD2Settings
from fewstep.methods.flow_matching import FlowMatchingSettings
from fewstep.source import run_source


@pytest.mark.parametrize(
    ("settings", "few_step"),
    [
        (FlowMatchingSettings(name="flow_matching"), False),
        (DMD2Settings(name="dmd2"), True),
        (DMD2Settings(name="dmd2", adversarial=AdversarialSettings()), True),
    ],
)
def test_students_have_steps_of_their_own_with_and_without_data(
    settings: Any, few_step: bool
) -> None:
    run: Any = SimpleNamespace(
        directory=Path("run"),
        roles={},
        result_role="student",
        method=settings.build(),
        recipe=SimpleNamespace(data=None, runtime=SimpleNamespace(threads=1)),
        items=None,
    )
    assert run_source(run).few_step is few_step
