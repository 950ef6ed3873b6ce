import ast
import sys
from pathlib import Path

import pytest

import fewstep.diffusion

FOLDER = Path(fewstep.diffusion.__file__).parent


def imported(source: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def allowed(name: str) -> bool:
    ours = name == "fewstep.diffusion" or name.startswith("fewstep.diffusion.")
    top = name.partition(".")[0]
    return ours or top == "torch" or top in sys.stdlib_module_names


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda f: f.name)
def test_the_mathematics_imports_torch_and_the_standard_library_alone(file: Path) -> None:
    foreign = [name for name in imported(file.read_text()) if not allowed(name)]
    assert foreign == []


def test_the_check_sees_what_it_is_for() -> None:
    found = imported("import numpy\nfrom fewstep.models import dit\nfrom . import paths")
    assert not any(map(allowed, found))
    assert len(found) == 3
