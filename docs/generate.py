"""The references of recipes, messages and commands, made from the code so that they cannot drift.

`conf.py` calls `write_references` at the start of every build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

import fewstep
from fewstep.cli import app

WORDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
# Overrides that go wrong on recipes/digits/student.yaml, for the page on messages.
MISTAKES = (
    "train.cylces=100",
    "lr=1e-4",
    "train.cycles=many",
    "method.steps=9",
    "method.name=dmd",
    "method.sigmas=[1,0.5]",
    "optimizers.fake_score=null",
    "storage=shared_base",
    "cycle.warmup_cycles=400",
    "optimizers.student.schedule.updates=null",
    "train.cycles",
)
DISCRIMINATED = {"model": "family", "method": "name", "data": "name"}


def write_references(directory: Path, root: Path) -> None:
    """Write the generated pages' parts into a folder; files that are right already are left alone.

    Args:
        directory: to write.
        root: of the repository.
    """
    directory.mkdir(exist_ok=True)
    pages = {
        "recipe_keys.md": recipe_reference(),
        "recipe_messages.md": message_reference(root / "recipes/digits/student.yaml"),
        "commands.md": command_reference(),
    }
    for name, text in pages.items():
        file = directory / name
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)


def recipe_reference() -> str:
    """Every section and key of a recipe as Markdown."""
    schema = fewstep.Recipe.model_json_schema()
    top = {**schema, "description": "Sections that are not marked as needed may be left out."}
    return "\n".join(section(top, "", {}, schema["$defs"], {}))


def section(
    schema: Mapping[str, Any],
    path: str,
    given: Mapping[str, Any],
    definitions: Mapping[str, Any],
    seen: dict[str, str],
    tag: str = "",
) -> Iterator[str]:
    """A table of one section's keys, and after it the sections inside.

    Args:
        schema: JSON schema of the section.
        path: its dotted key; "" for the whole recipe.
        given: defaults of the section as a whole, which go before the keys' own.
        definitions: of the models, by name.
        seen: section model and defaults -> where its table is.
        tag: the family or method, where there are several.
    """
    title = f"`{path}`" if path else "The whole recipe"
    heading = "###" if "." in path else "##"
    yield f"{heading} {title}{f' ({tag})' if tag else ''}\n"
    yield f"{escape(schema.get('description', ''))}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    inner = []
    for key, field in schema["properties"].items():
        dotted = f"{path}.{key}" if path else key
        default = given.get(key, field.get("default", ...))
        needed = key in schema.get("required", ())
        models = list(referenced(field))
        inner += [(dotted, name, default, len(models) > 1) for name in models]
        shown = "needed" if needed or default is ... else value_text(default, bool(models))
        description = escape(field.get("description", ""))
        if models:
            description = ". ".join(part for part in (description, "A section, see below") if part)
        yield f"| `{dotted}` | {escape(kind(field))} | {shown} | {description} |"
    yield ""
    for dotted, name, default, several in inner:
        model, defaults = definitions[name], default if isinstance(default, dict) else {}
        if several and defaults:
            key = DISCRIMINATED[dotted]
            defaults = defaults if defaults[key] in choices(model["properties"][key]) else {}
        signature = name + json.dumps(defaults)
        if signature in seen:
            yield f"### `{dotted}`\n\nThe same keys and defaults as `{seen[signature]}`.\n"
            continue
        seen[signature] = dotted
        label = choice_label(model, DISCRIMINATED[dotted]) if several else ""
        yield from section(model, dotted, defaults, definitions, seen, label)


def choice_label(model: Mapping[str, Any], key: str) -> str:
    """What makes a section this one of several kinds, as in "name: digits, custom, none"."""
    return f"{key}: {', '.join(choices(model['properties'][key]))}"


def choices(field: Mapping[str, Any]) -> list[str]:
    """The values of a field that takes one or a few texts."""
    return field.get("enum") or [field["const"]]


def referenced(field: Mapping[str, Any]) -> Iterator[str]:
    """Names of the section models that a field may hold."""
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2]
    for part in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from referenced(part)


def kind(field: Mapping[str, Any]) -> str:
    """What values a field takes, in words."""
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "anyOf" in field:
        return " or ".join(kind(part) for part in field["anyOf"])
    if "$ref" in field or "oneOf" in field:
        return "section"
    if field["type"] == "array":
        items = field.get("prefixItems") or [field["items"]]
        count = f"{len(items)}: " if "prefixItems" in field else ""
        return f"list of {count}{kind(items[0])}"
    if field["type"] == "object":
        return f"names, each with a {kind(field['additionalProperties'])}"
    bounds = [
        f"{sign} {field[name]:g}"
        for name, sign in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if name in field
    ]
    return WORDS[field["type"]] + (f" {' and '.join(bounds)}" if bounds else "")


def value_text(value: Any, is_section: bool) -> str:
    """A default as it would be written in a recipe."""
    if is_section and value is not None:
        return "its defaults"
    return f"`{json.dumps(value)}`" if value != "" else "empty"


def escape(text: str) -> str:
    """Text that is safe in a cell of a Markdown table; what stands in backticks stays code."""
    parts = " ".join(text.split()).split("`")
    return "`".join(
        part if index % 2 else re.sub(r"([*_<>|\[\]])", r"\\\1", part)
        for index, part in enumerate(parts)
    )


def message_reference(recipe: Path) -> str:
    """What wrong overrides are answered, as Markdown; made by trying them.

    Raises:
        ValueError: where one of them is accepted.
    """
    lines = ["| given | answer |", "|---|---|"]
    for override in MISTAKES:
        try:
            fewstep.load_recipe(recipe, [override])
        except fewstep.UserError as error:
            answer = str(error).replace(f"{recipe}:", "").strip()
            lines.append(f"| `{override}` | {escape(answer)} |")
        else:
            raise ValueError(f"{override!r} is no mistake any more: take it from MISTAKES")
    return "\n".join(lines) + "\n"


def command_reference() -> str:
    """Every command with its arguments and options as Markdown."""
    group: Any = typer.main.get_command(app)
    lines = []
    for name, command in group.commands.items():
        lines.append(f"## fewstep {name}\n\n{help_text(command.help)}\n")
        lines.append("| argument or option | default | meaning |\n|---|---|---|")
        for parameter in command.params:
            option = parameter.opts[0].startswith("-")
            written = parameter.opts[0] if option else parameter.metavar or parameter.name.upper()
            unset = parameter.default is None or parameter.default is False
            default = "needed" if parameter.required else "" if unset else parameter.default
            meaning = escape(help_text(parameter.help or ""))
            lines.append(f"| `{written}` | {escape(str(default))} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def help_text(text: str) -> str:
    """A command's help without the terminal's markup."""
    return Text.from_markup(text).plain.strip()
