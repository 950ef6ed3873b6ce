"""Imports point down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fewstep"
# From the lowest to the highest. A name stands for a module, or for all modules of a package.
LAYERS = (
    ("errors", "settings", "files"),
    ("diffusion",),
    ("models",),
    ("roles",),
    ("parallel",),
    ("data",),
    ("methods",),
    ("training",),
    (
        "checkpoint",
        "clip",
        "features",
        "evaluation",
        "results",
        "sampling",
        "grouping",
        "placement",
    ),
    ("validation", "rollout", "weights"),
    ("config",),
    ("build",),
    ("pretrained",),
    ("run",),
    (
        "pipeline",
        "pipeline_sd3",
        "pipeline_engine",
        "activations",
        "decoding",
        "memory",
        "budget",
        "remedies",
        "memory_tables",
        # Below what writes exports, which needs diffusers and PEFT: sampling starts sooner.
        "export_description",
        "source",
    ),
    (
        "report",
        "report_data",
        "figures",
        "export",
        "export_lora",
        "export_kohya",
        "export_check",
        "export_readme",
        "inspection",
        "plan",
        "images",
        "comparison",
        "arguments",
    ),
    ("launch",),
    ("__init__", "__main__", "cli", "progress"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SINGLE_DEVICE = ("diffusion", "models", "roles", "methods")
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if "templates" not in file.relative_to(PACKAGE).parts
}


def imports(module: str, source: str) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it, made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = ["fewstep", *module.split(".")][: -node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            # `from package import module` names a module as well.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(module: str, source: str) -> Iterator[str]:
    """The first part below fewstep of what a module imports of ours."""
    for name in imports(module, source):
        parts = name.split(".")
        if parts[0] == "fewstep":
            top = parts[1] if len(parts) > 1 else "__init__"
            yield (
                top if (PACKAGE / top).is_dir() or (PACKAGE / f"{top}.py").exists() else "__init__"
            )


def problems(module: str, source: str) -> list[str]:
    """What is wrong with a module's imports."""
    top = module.split(".")[0]
    if top not in LEVEL:
        return [f"fewstep/{top} is in no layer: place it in LAYERS of tests/test_layers.py"]
    found = []
    for other in own_imports(module, source):
        if other not in LEVEL:
            found.append(f"fewstep/{other} is in no layer: place it in LAYERS")
        elif LEVEL[other] > LEVEL[top]:
            found.append(f"{module} imports {other}, which is in a higher layer")
    return found


def test_there_is_something_to_check() -> None:
    assert {"__init__", "errors", "diffusion.paths", "training.worker"} <= MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module) -> None:
    assert problems(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("diffusion.")])
def test_diffusion_imports_torch_and_nothing_else_of_ours(module) -> None:
    import sys

    for name in imports(module, MODULES[module].read_text()):
        top, _, rest = name.partition(".")
        known = top == "torch" or top in sys.stdlib_module_names
        assert known or (top == "fewstep" and rest.startswith("diffusion.")), name


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("training.")])
def test_training_knows_neither_launch_nor_checkpoint(module) -> None:
    source = MODULES[module].read_text()
    assert {"launch", "checkpoint"}.isdisjoint(own_imports(module, source))


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in SINGLE_DEVICE])
def test_single_device_code_knows_no_ranks(module) -> None:
    source = MODULES[module].read_text()
    for name in imports(module, source):
        assert not name.startswith(("torch.distributed", "ray", "torch.nn.parallel")), name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "distributed")


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("diffusion.draw", "from fewstep.models.model import Model", True),
        ("diffusion.draw", "import fewstep.models", True),
        ("diffusion.draw", "def f():\n    from fewstep import roles", True),
        ("diffusion.draw", "from ..training import worker", True),
        ("diffusion.draw", "from .paths import Path", False),
        ("training.loop", "from fewstep.checkpoint import MANIFEST", True),
        ("training.loop", "from fewstep import Recipe", True),
        ("training.loop", "from fewstep.methods.method import Method", False),
        ("somewhere", "", True),
    ],
)
def test_the_check_finds_what_it_should(module, source, wrong) -> None:
    assert bool(problems(module, source)) == wrong
