"""Fewstep: distil a diffusion or flow-matching teacher into a one- to eight-step student.

In a notebook:

    import fewstep

    recipe = fewstep.load_recipe("recipes/digits/student.yaml", ["train.cycles=100"])
    run = fewstep.train(recipe, on_cycle=lambda cycle, results: print(cycle))
    images = run.sample(classes=[3, 1, 4]).images
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewstep.comparison import evaluate_sources, write_comparison
    from fewstep.config import Recipe, load_recipe, parse_recipe
    from fewstep.data.dataset import Dataset
    from fewstep.errors import TrainingError, UserError
    from fewstep.export import export_run
    from fewstep.launch.encode import encode
    from fewstep.launch.local import train
    from fewstep.models.model import Model
    from fewstep.models.module import ModuleModel
    from fewstep.run import Run, open_run
    from fewstep.source import open_source, run_source

__all__ = [
    "Dataset",
    "Model",
    "ModuleModel",
    "Recipe",
    "Run",
    "TrainingError",
    "UserError",
    "encode",
    "evaluate_sources",
    "export_run",
    "load_recipe",
    "open_run",
    "open_source",
    "parse_recipe",
    "run_source",
    "train",
    "write_comparison",
]

# Where each name lives. They are imported when first used: `fewstep --help` needs none of them,
# and torch and diffusers take seconds.
_HOMES = {
    "Dataset": "fewstep.data.dataset",
    "Model": "fewstep.models.model",
    "ModuleModel": "fewstep.models.module",
    "Recipe": "fewstep.config",
    "Run": "fewstep.run",
    "TrainingError": "fewstep.errors",
    "UserError": "fewstep.errors",
    "encode": "fewstep.launch.encode",
    "evaluate_sources": "fewstep.comparison",
    "export_run": "fewstep.export",
    "load_recipe": "fewstep.config",
    "open_run": "fewstep.run",
    "open_source": "fewstep.source",
    "parse_recipe": "fewstep.config",
    "run_source": "fewstep.source",
    "train": "fewstep.launch.local",
    "write_comparison": "fewstep.comparison",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
