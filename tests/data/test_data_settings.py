"""The recipe's section `data`: what each kind of it takes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fewstep.config import dump_recipe, load_recipe, parse_recipe
from fewstep.errors import UserError

FILES = {"files": ["p.txt"], "encoded": "e"}


def problem(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as told:
        parse_recipe(values)
    return str(told.value)


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        ({"name": "digits", "files": ["x"]}, "data.files: there is no such key"),
        ({"name": "prompts", **FILES, "image_size": 8}, "data.image_size: there is no such key"),
        ({"name": "images", **FILES, "split": "test"}, "data.split: there is no such key"),
        ({"name": "prompts", "encoded": "e"}, "data.files: is missing"),
        ({"name": "prompts", "files": ["x"]}, "data.encoded: is missing"),
        (
            {"name": "prompts", "files": [], "encoded": "e"},
            "data.files: has 0 entries; it needs at least 1",
        ),
        (
            {"name": "prompts", "files": "x", "encoded": "e"},
            "data.files: 'x' is given; it should be",
        ),
        ({"name": "prompts", **FILES, "encoded": " "}, "data: encoded: is empty; name a directory"),
        (
            {"name": "prompt", **FILES},
            "data.name: 'prompt' is not one of digits, custom, none, pro",
        ),
        ({**FILES}, "data.name: None is not one of"),
        (
            {"name": "prompts", **FILES, "validation": ["v.txt"], "validation_items": 3},
            "validation_items: 3 is given, and validation as well",
        ),
        ({"name": "prompts", **FILES, "batch_sise": 3}, "did you mean data.batch_size?"),
        (
            {"name": "images", **FILES, "background": [0, 0, 256]},
            "data.background.2: 256 is given; it should be less than or equal to 255",
        ),
        ({"name": "prompts", **FILES, "dtype": "float64"}, "'bfloat16', 'float16' or 'float32'"),
    ],
)
def test_wrong_keys_are_named(recipe_values: Callable[..., Any], data, answer: str) -> None:
    assert answer in problem(recipe_values("dmd2") | {"data": data})


@pytest.mark.parametrize(
    "data",
    [
        {"name": "prompts", **FILES, "validation_items": 3},
        {"name": "images", **FILES, "background": [1, 2, 3], "validation": ["v"]},
    ],
)
def test_a_recipe_survives_being_written(recipe_values: Callable[..., Any], data, tmp_path) -> None:
    recipe = parse_recipe(recipe_values("dmd2") | {"data": data})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize("spelled", ["p.txt", "./p.txt", "link.txt"])
def test_sources_are_in_one_split_only(
    recipe_values: Callable[..., Any], tmp_path, spelled: str
) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a\nb\n")
    (tmp_path / "link.txt").symlink_to(file)
    held = f"{tmp_path}/{spelled}"
    data = {"name": "prompts", "files": [str(file)], "validation": [held], "encoded": "e"}
    recipe = parse_recipe(recipe_values("dmd2") | {"data": data})
    with pytest.raises(UserError, match=r"data.validation: .*\.txt is among data.files as well"):
        recipe.data.sources()
