"""Recipes whose data are prompts and images, and the doubles that encode them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewstep.config import Recipe

sys.path.insert(0, str(Path(__file__).parent))

MakeData = Callable[..., Recipe]


@pytest.fixture
def data_recipe(make_recipe: Callable[..., Recipe], tmp_path: Path) -> MakeData:
    """A tiny recipe on `data`, encoded into `tmp_path/encoded` two items a shard."""

    def make(name: str, *files: object, method: str = "", **others: Any) -> Recipe:
        kind = method or ("flow_matching" if name == "images" else "dmd2")
        data = {
            "name": name,
            "files": [str(file) for file in files],
            "encoded": str(tmp_path / "encoded"),
            "dtype": "float32",
            "shard_items": 2,
            "batch_size": 3,
        }
        changes = {"model": {"family": "module"}, "data": data | others, "ema": None}
        return make_recipe(kind, changes)

    return make
