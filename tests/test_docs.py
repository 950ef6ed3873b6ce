"""The documentation: its commands, options, recipe keys, messages, links and code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
import typer

import fewstep
from fewstep.cli import app
from fewstep.config import Recipe, all_keys
from fewstep.methods import METHODS
from fewstep.models import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "models").glob("*.md")),
]
FENCE = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
COMMANDS: Any = typer.main.get_command(app)
KEYS = {*all_keys(Recipe), "data.sha256"}  # the latter: of the training data, in a fingerprint
OF_NAMES = ("placement.groups",)  # below it are names that a recipe chooses
SECTIONS = tuple(Recipe.model_fields)
OTHER_PROGRAMS = ("source", "tensorboard", "hf")
FILE_ENDINGS = (".py", ".md", ".yaml", ".json", ".png", ".html", ".safetensors")


def blocks(page: Path, language: str) -> Iterator[str]:
    """The fenced blocks of a language in a page."""
    for _, info, body in FENCE.findall(page.read_text()):
        if info.strip() == language:
            yield body


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def from_pages(language: str) -> list[Any]:
    """All blocks of a language as parameters of a test."""
    return [
        pytest.param(block, id=f"{page.name}-{index}")
        for page in PAGES
        for index, block in enumerate(blocks(page, language))
    ]


def command_lines() -> list[Any]:
    """All commands in the pages as parameters of a test."""
    return [
        pytest.param(line.split("#")[0].strip(), id=f"{page.name}: {line}")
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def make_targets() -> set[str]:
    """Targets that the Makefile declares."""
    declared = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(declared.group(1).split()) if declared else set()


def messages() -> list[str]:
    """Every string in the package, with "{}" for what is filled in."""
    found = []
    for file in (ROOT / "fewstep").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
                found.append("".join(map(str, parts)))
    return found


def check_fewstep(arguments: list[str]) -> None:
    """A command line of ours parses, and its recipe does with its overrides."""
    name, *rest = arguments
    assert name in COMMANDS.commands, f"there is no command {name!r}"
    # Parses options and values, and runs nothing.
    context = COMMANDS.commands[name].make_context(name, list(rest))
    recipe = context.params.get("recipe") or context.params.get("target")
    if recipe is not None and str(recipe).endswith((".yaml", ".yml")):
        fewstep.load_recipe(ROOT / recipe, context.params.get("overrides") or [])


@pytest.mark.parametrize("line", command_lines())
def test_commands_exist_and_parse(line) -> None:
    program, *arguments = shlex.split(line)
    if program == "fewstep":
        check_fewstep(arguments)
    elif program == "torchrun":
        options = torch.distributed.run.get_args_parser().parse_args(arguments)
        assert options.module
        assert options.training_script == "fewstep"
        check_fewstep(options.training_script_args)
    elif program == "ray":
        from ray.scripts.scripts import cli

        name, *options = arguments
        cli.commands[name].make_context(name, options)
    elif program == "make":
        targets = {argument for argument in arguments if "=" not in argument}
        assert targets <= make_targets()
    elif program == "python":
        assert arguments[0] == "-m" or (ROOT / arguments[0]).is_file()
    else:
        assert program in OTHER_PROGRAMS


@pytest.mark.parametrize("code", from_pages("yaml"))
def test_pieces_of_recipes_have_known_keys(code) -> None:
    import yaml

    def keys(values: Any, prefix: str = "") -> Iterator[str]:
        for key, value in values.items():
            yield prefix + key
            if isinstance(value, dict) and prefix + key not in OF_NAMES:
                yield from keys(value, f"{prefix}{key}.")

    assert set(keys(yaml.safe_load(code))) <= KEYS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipe_keys_exist(page) -> None:
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        key = re.split("[=:]", code)[0]
        parts = key.split(".")
        if len(parts) > 1 and parts[0] in SECTIONS and not key.endswith(FILE_ENDINGS):
            assert key in KEYS, f"{page.name}: `{code}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_in_prose_exist(page) -> None:
    parameters = [p for c in COMMANDS.commands.values() for p in c.params]
    options = {option for p in parameters for option in (*p.opts, *p.secondary_opts)}
    options |= set(torch.distributed.run.get_args_parser()._option_string_actions)
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if code.startswith("--"):
            assert code.split()[0] in options, f"{page.name}: `{code}`"
        elif match := re.match(r"(fewstep|make) (\w+)", code):
            known = COMMANDS.commands if match[1] == "fewstep" else make_targets()
            assert match[2] in known, f"{page.name}: `{code}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", prose(file), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_repository_that_are_named_exist(page) -> None:
    pattern = r"`((?:recipes|examples|tests|fewstep|docs)/[\w/.-]+)`"
    for name in re.findall(pattern, prose(page)):
        generated = name.startswith("docs/_")
        assert generated or (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("code", from_pages("python"))
def test_python_compiles_and_its_names_of_ours_exist(code) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "fewstep":
                assert hasattr(fewstep, node.attr), node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fewstep"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_quoted_messages_are_those_of_the_code() -> None:
    quotes = re.findall(r'\*\*"(.+?)"\*\*', prose(ROOT / "docs/troubleshooting.md"))
    assert len(quotes) > 15
    known = messages()
    for quote in quotes:
        parts = [re.escape(part) for part in re.split(r"\s*\.\.\.:?\s*", quote) if part]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(pattern.search(message) for message in known), quote


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_a_method_is_explained(name) -> None:
    page = (ROOT / "docs/methods.md").read_text()
    text = page[page.index(f"\n## {name}\n") :]
    for key in METHODS[name].model_fields:
        assert key == "name" or f"`method.{key}`" in text, key


def test_everything_public_is_in_the_reference() -> None:
    page = (ROOT / "docs/api.md").read_text()
    assert [name for name in fewstep.__all__ if f":: fewstep.{name}\n" not in page] == []


def test_families_and_commands_are_named() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []
    assert [name for name in COMMANDS.commands if f"fewstep {name} " not in text] == []


def test_the_reference_of_recipes_has_every_key() -> None:
    generate = load_generator()
    listed = set(re.findall(r"^\| `([\w.]+)`", generate.recipe_reference(), re.MULTILINE))
    again = ("method.fake_sigmas", "method.adversarial.sigmas")
    again += ("optimizers.fake_score", "optimizers.discriminator")
    repeated = {f"{section}." for section in again}
    missing = {key for key in all_keys(Recipe) if not key.startswith(tuple(repeated))} - listed
    assert missing == set()
    for section in repeated:
        assert f"`{section[:-1]}`\n\nThe same keys and defaults as" in generate.recipe_reference()


def load_generator() -> Any:
    """`docs/generate.py` as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with the recipes and a tiny teacher of the digits; the current directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    small = ["num_layers=1", "num_attention_heads=1", "attention_head_dim=8"]
    fewstep.train(
        fewstep.load_recipe(
            "recipes/digits/teacher.yaml",
            ["train.cycles=1", "train.batch_size=4", *(f"model.network.{s}" for s in small)],
        )
    )
    return tmp_path


def test_the_python_of_readme_and_export_page_runs(workplace) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    tiny = '"train.cycles=1", "cycle.warmup_cycles=0", "train.batch_size=4", "validation=null"'
    assert '"train.cycles=100"' in code
    names: dict[str, Any] = {}
    exec(code.replace('"train.cycles=100"', tiny), names)
    assert names["images"].shape == (3, 1, 8, 8)

    loop, pipeline = blocks(ROOT / "docs/export.md", "python")
    index = json.loads((workplace / "runs/mine/export/model_index.json").read_text())
    assert f"sigmas={index['sigmas']}" in loop
    for block in (loop, pipeline):
        names = {}
        exec(block.replace("runs/digits/export", "runs/mine/export"), names)
        assert names.get("images", names.get("x")).shape == (10, 1, 8, 8)


def test_the_python_of_the_page_on_networks_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs/your-own-network.md", "python"):
        exec(block, names)
    labels = {"class_labels": names["torch"].tensor([0, 1])}
    x, sigma = names["torch"].zeros(2, 2), names["torch"].ones(2)
    network = names["model"].build_network()
    assert names["model"].forward(network, x, sigma, labels).shape == (2, 2)
    assert (tmp_path / "runs/my_teacher/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "settings"), [("my_method", "MyMethodSettings"), ("my_family", "MyFamilySettings")]
)
def test_the_skeletons_for_contributors_are_whole(name, settings, tmp_path, monkeypatch) -> None:
    (code,) = (b for b in blocks(ROOT / "CONTRIBUTING.md", "python") if f'"{name}"' in b)
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    made = getattr(module, settings)()
    made.build()  # fails where an abstract method is missing
    if name == "my_method":
        assert made.resolved() == made


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path) -> None:
    for module in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "html")]
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    environment["https_proxy"] = environment["http_proxy"]
    done = subprocess.run([*command, *folders], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html/recipes.html").read_text()
    assert "method.fake_updates_per_student" in page
    for file in (tmp_path / "html").glob("*.html"):
        tags = re.findall(r"<(?:script|img|link)[^>]*>", file.read_text())
        remote = [tag for tag in tags if re.search(r"""(?:src|href)=["']https?:""", tag)]
        assert remote == [], f"{file.name} loads {remote}"
