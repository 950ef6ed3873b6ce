"""Recipes are strict: what is wrong is named, with what would be right."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from fewstep.config import (
    MAY_CHANGE,
    Recipe,
    all_keys,
    check_fingerprint,
    dump_recipe,
    fingerprint,
    load_recipe,
    parse_overrides,
    parse_recipe,
    settings_in,
)
from fewstep.errors import UserError
from fewstep.methods import METHODS
from fewstep.models import FAMILIES
from fewstep.settings import Settings

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))


def problem(values: Any) -> str:
    """What parsing says is wrong."""
    with pytest.raises(UserError) as error:
        parse_recipe(values, "some.yaml")
    assert str(error.value).startswith("some.yaml:")
    return str(error.value)


# Keys.


@pytest.mark.parametrize(
    ("method", "key", "meant"),
    [
        ("dmd2", "method.fake_update_per_student", "method.fake_updates_per_student"),
        ("dmd2", "method.guidence", "method.guidance"),
        ("dmd2", "method.score_sigmas.minimun", "method.score_sigmas.minimum"),
        ("dmd2", "train.cycle", "train.cycles"),
        ("dmd2", "optimizers.student.schedule.warmup", "optimizers.student.schedule.warmup_upd"),
        ("dmd2", "optimizers.fake_scor", "optimizers.fake_score"),
        ("dmd2", "optimizer", "optimizers"),
        ("dmd2", "lr", "optimizers.student.lr"),
        ("dmd2", "learning.batch_size", ""),
        ("dmd2", "guidance", "method."),
        ("dmd2", "model.network.num_layer", "model.network.num_layers"),
        ("flow_matching", "method.label_drop", "method.label_dropout"),
        ("flow_matching", "method.guidance", "method.sampling.guidance"),
        ("flow_matching", "method.steps", "method.sampling.steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(recipe_values, method, key, meant) -> None:
    text = problem(recipe_values(method, {key: 1}))
    unknown = key if meant else key.rpartition(".")[0]
    assert f"  {unknown}: there is no such key" in text
    if meant:
        assert f"did you mean {meant}" in text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", ["", "method.", "model.", "train.", "optimizers.student."])
@pytest.mark.parametrize("name", [*METHODS, *FAMILIES, "zzz", "a.b", "1"])
def test_any_unknown_key_is_named_whatever_it_is_called(recipe_values, method, place, name) -> None:
    values = recipe_values(method)
    section = values
    for part in place.split(".")[:-1]:
        section = section[part]
    section[name] = 1
    text = problem(values)
    line = next(x for x in text.splitlines() if "there is no such key" in x)
    assert line.startswith(f"  {place}{name}: ")
    assert f"did you mean {place}{name}?" not in line


@pytest.mark.parametrize("method", METHODS)
def test_a_key_of_another_method_is_never_proposed_for_itself(recipe_values, method) -> None:
    own = set(all_keys(METHODS[method]))
    for other in METHODS.values():
        for key in set(other.model_fields) - own:
            text = problem(recipe_values(method, {f"method.{key}": 1}))
            assert f"method.{key}: there is no such key" in text
            assert f"did you mean method.{key}?" not in text


@pytest.mark.parametrize("key", ["model", "method", "optimizers", "train", "train.cycles"])
def test_what_is_needed_and_missing_is_named(recipe_values, key) -> None:
    values = recipe_values()
    *sections, last = key.split(".")
    section = values
    for part in sections:
        section = section[part]
    del section[last]
    assert f"  {key}: is missing" in problem(values)


def test_a_list_that_is_too_short_is_refused_in_words(recipe_values) -> None:
    text = problem(recipe_values("dmd2", {"method.adversarial": {"blocks": []}}))
    assert "  method.adversarial.blocks: has 0 entries; it needs at least 1" in text


def test_all_problems_are_listed_at_once(recipe_values) -> None:
    text = problem(recipe_values("dmd2", {"seed": -1, "train.cycles": 0, "method.stepz": 4}))
    assert len(text.splitlines()) == 4


# Values.


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("method.fake_updates_per_student", 0, "greater than or equal to 1"),
        ("method.steps", 0, "greater than or equal to 1"),
        ("method.steps", 9, "less than or equal to 8"),
        ("method.steps", 2.0, "whole number"),
        ("method.steps", "4", "whole number"),
        ("method.guidance", "2", "should be a number"),
        ("method.guidance", -1, "greater than or equal to 0"),
        ("method.guidance", float("nan"), "finite number"),
        ("method.guidance", float("inf"), "finite number"),
        ("method.guidance", None, "should be a number"),
        ("method.transition", "ddim", "'renoise' or 'euler'"),
        ("method.sigmas", [1.0, 0.5, 1.5], "less than or equal to 1"),
        ("method.sigmas", 0.5, "should be a list"),
        ("optimizers.student.lr", "1e-4", "should be a number"),
        ("optimizers.student.lr", 0, "greater than 0"),
        ("optimizers.student.lr", float("-inf"), "finite number"),
        ("optimizers.student.betas", [0.9, 1.0], "less than 1"),
        ("seed", -1, "greater than or equal to 0"),
        ("train.cycles", 0, "greater than 0"),
        ("train.micro_batch_size", 0, "greater than 0"),
        ("ema.decay", 1.0, "less than 1"),
        ("checkpoint.keep", 0, "greater than or equal to 1"),
        ("storage", "lora", "'independent' or 'shared_base'"),
        ("data.name", "mnist", "one of digits, custom, none, prompts, images"),
        ("runtime.dtype", "float16", "'float32' or 'float64'"),
        ("logging.tensorboard", "yes", "true or false"),
        ("logging.tensorboard", 1, "true or false"),
        ("run_dir", 3, "should be text"),
        ("train", [1], "a section of keys"),
        ("method", "dmd2", "a section of keys"),
        ("ema", True, "a section of keys"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(recipe_values, key, value, right) -> None:
    (line,) = [x for x in problem(recipe_values("dmd2", {key: value})).splitlines() if key in x]
    assert line.startswith(f"  {key}")
    assert repr(value if not isinstance(value, list) else value[-1]) in line
    assert right in line


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("method.name", "dmd3", "flow_matching, dmd2"),
        ("method.name", None, "flow_matching, dmd2"),
        ("method.name", 5, "flow_matching, dmd2"),
        ("model.family", "unet", "dit, mixture, module"),
    ],
)
def test_unknown_methods_and_families(recipe_values, key, value, known) -> None:
    text = problem(recipe_values("dmd2", {key: value}))
    assert f"  {key}: {value!r} is not one of {known}" in text


def test_no_method_at_all(recipe_values) -> None:
    values = recipe_values()
    del values["method"]["name"]
    assert "method.name: None is not one of flow_matching, dmd2" in problem(values)


@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        ("dmd2", {"lora.rank": 2}, "lora: only for storage 'shared_base'"),
        ("dmd2", {"storage": "shared_base", "lora": None}, "lora: storage 'shared_base' needs it"),
        ("dmd2", {"optimizers.fake_score": None}, "trains student, fake_score, but optimizers are"),
        (
            "flow_matching",
            {"optimizers.fake_score": {"lr": 1e-3}},
            "method 'flow_matching' trains student, but optimizers are given for fake_score, stu",
        ),
        ("flow_matching", {"data.name": "none"}, "data.name: method 'flow_matching' trains on"),
        ("flow_matching", {"cycle.warmup_cycles": 1}, "'flow_matching' has no fake_score phases"),
        ("flow_matching", {"cycle.order": "fake_score_first"}, "has no fake_score phases"),
        ("dmd2", {"cycle.warmup_cycles": 4}, "cycle.warmup_cycles (4) must be below train.cycles"),
        ("dmd2", {"method.sigmas": [1.0]}, "steps is 2, but sigmas has 1 entries"),
        ("dmd2", {"method.sigmas": [0.5, 1.0]}, "sigmas must fall from noise to data"),
        ("dmd2", {"method.sigmas": [1.0, 1.0]}, "sigmas must fall from noise to data"),
        ("dmd2", {"method.score_sigmas": {"minimum": 0.5, "maximum": 0.5}}, "must be below"),
        ("dmd2", {"model": {"family": "dit"}}, "give 'weights' (trained ones) or 'network'"),
        ("dmd2", {"optimizers.student.schedule.kind": "cosine"}, "'updates' is needed for kind"),
    ],
)
def test_impossible_combinations(recipe_values, method, changes, text) -> None:
    assert text in problem(recipe_values(method, changes))


@pytest.mark.parametrize("value", [None, 3, "text", [], [1], True])
def test_a_recipe_is_a_mapping(value) -> None:
    assert "mapping" in problem(value)


# No bool is a number, anywhere.


def numeric_places(annotation: Any) -> Iterator[type]:
    """The int and float types that an annotation is made of."""
    origin = get_origin(annotation)
    if annotation in (int, float):
        yield annotation
    elif origin is Annotated:
        yield from numeric_places(get_args(annotation)[0])
    elif origin is not Literal:
        for part in get_args(annotation):
            yield from numeric_places(part)


def all_models(model: type[Settings]) -> set[type[Settings]]:
    found = {model}
    for field in model.model_fields.values():
        for section in settings_in(field.annotation):
            found |= all_models(section)
    return found


MODELS = sorted(all_models(Recipe), key=lambda m: m.__name__)
NUMERIC = [
    (model, name)
    for model in MODELS
    for name, field in model.model_fields.items()
    if any(numeric_places(field.annotation))
]


def test_the_walk_reaches_all_sections() -> None:
    assert {*METHODS.values(), *FAMILIES.values()} <= set(MODELS)
    names = {f"{model.__name__}.{name}" for model, name in NUMERIC}
    assert {"OptimizerSettings.betas", "DMD2Settings.sigmas", "DiTNetwork.patch_size"} <= names
    assert len(names) > 50


def examples(annotation: Any, value: Any) -> list[Any]:
    """Values of the annotation's form with `value` in each place where a number belongs."""
    origin = get_origin(annotation)
    if annotation in (int, float):
        return [value]
    if origin is Annotated:
        return examples(get_args(annotation)[0], value)
    if origin in (Union, types.UnionType):
        return [e for part in get_args(annotation) for e in examples(part, value)]
    if origin is tuple:
        parts = [p for p in get_args(annotation) if p is not Ellipsis]
        return [[0.5] * k + [value] + [0.5] * (len(parts) - k - 1) for k in range(len(parts))]
    return []


@pytest.mark.parametrize("value", [True, False, "1", "0.5", float("nan"), float("inf")])
@pytest.mark.parametrize(("model", "name"), NUMERIC)
def test_no_number_is_a_bool_a_string_or_not_finite(model, name, value) -> None:
    field = model.model_fields[name]
    tried = examples(field.annotation, value)
    assert tried
    for example in tried:
        with pytest.raises(ValidationError) as error:
            model.model_validate_json(json.dumps({name: example}))
        assert any(p["loc"][:1] == (name,) for p in error.value.errors()), example


@pytest.mark.parametrize("model", MODELS)
def test_every_section_is_frozen_and_refuses_unknown_keys(model) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate_json('{"no_such_key": 1}')
    assert any(p["type"] == "extra_forbidden" for p in error.value.errors())
    assert model.model_config["frozen"]
    assert model.model_config["strict"]


@pytest.mark.parametrize("model", MODELS)
def test_defaults_are_valid(model) -> None:
    for name, field in model.model_fields.items():
        if not field.is_required():
            adapter = TypeAdapter(Annotated[field.annotation, field])
            adapter.validate_python(field.get_default(), strict=True)
            assert name


# Files and overrides.


@pytest.fixture
def file(tmp_path, recipe_values) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(parse_recipe(recipe_values())))
    return path


@pytest.mark.parametrize(
    "content",
    [
        "seed: [1\n",
        "seed: 1\nseed: 2\n",
        "\tseed: 1\n",
        "seed: !!python/object:os.system x\n",
        "- 1\n- 2\n",
        "hello",
        "3",
        "",
        "~: 1\n",
        "seed: ${nowhere}\n",
        "seed: ???\n",
        "seed: !!binary aGk=\n",
        "seed: 2020-01-01\n",
        "a: &x [*x]\n",
        "? [1, 2]\n: 3\n",
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", b"\x00", b"seed: \x80\n"])
def test_a_file_that_is_no_text_is_named(tmp_path, content) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.yaml"):
        load_recipe(path)


def test_a_missing_file_is_named_with_those_that_exist(file) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(file.parent / "recipes.yaml")
    assert "recipes.yaml does not exist" in str(error.value)
    assert str(file) in str(error.value)
    for path in (file.parent, file.parent / "none" / "x.yaml"):
        with pytest.raises(UserError, match="does not exist"):
            load_recipe(path)


def test_overrides_are_applied_with_yaml_values(file) -> None:
    recipe = load_recipe(
        file,
        [
            "train.cycles=7",
            "optimizers.student.betas=[0.1,0.2]",
            "optimizers.student.lr=1e-4",
            "ema=null",
            "run_dir=a=b",
            "train.micro_batch_size=2",
        ],
    )
    assert recipe.train.cycles == 7
    assert recipe.optimizers.student.betas == (0.1, 0.2)
    assert recipe.optimizers.student.lr == 1e-4
    assert recipe.ema is None
    assert recipe.run_dir == "a=b"
    assert recipe.train.micro_batch_size == 2


@pytest.mark.parametrize("override", ["train.cycles", "=5", "--train.cycles=5", "-x=1", "", "="])
def test_a_malformed_override_is_shown_with_the_right_form(file, override) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(file, [override])
    assert repr(override) in str(error.value)
    assert "write key=value, as in train.cycles=100" in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "train.cycles=[1",
        "seed=${",
        "seed=${x}",
        "train..cycles=3",
        ".=1",
        "train=5",
        "train.cycles=",
        "train.cycles=true",
        "train.cycles='5'",
        "method.sigmas.0=1",
        "train.cycels=5",
        "optimizers.student.betas[0]=1",
        "seed={a: 1}",
        "a b=1",
    ],
)
def test_an_override_that_does_not_fit_is_an_error(file, override) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(file, [override])
    assert "Traceback" not in str(error.value)
    with pytest.raises(UserError):
        parse_overrides(["x"])


# Round trips.


def assert_round_trip(recipe: Recipe, path: Path) -> None:
    path.write_text(dump_recipe(recipe))
    again = load_recipe(path)
    assert again == recipe
    assert dump_recipe(again) == dump_recipe(recipe)
    assert fingerprint(again) == fingerprint(recipe)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: "/".join(p.parts[-2:]))
def test_our_recipes_are_valid_and_come_back_from_the_file(path, tmp_path) -> None:
    assert_round_trip(load_recipe(path), tmp_path / "copy.yaml")


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 2


@pytest.mark.parametrize("method", ["dmd2", "flow_matching"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"storage": "shared_base", "lora.targets": ["to_q", "to_out.0"]},
        {"optimizers.student.lr": 1e-7, "ema.decay": 1 - 1e-9, "optimizers.student.eps": 1e-300},
        {"optimizers.student.lr": 1 / 3, "optimizers.student.betas": [0, 0.1 + 0.2]},
        {"run_dir": "true", "seed": 2**70},
        {"run_dir": "1e5"},
        {"run_dir": "null # : {} ünï\n"},
        {"run_dir": "007"},
        {"run_dir": "-.5E+3"},
        {"run_dir": "1_0.0"},
        {"run_dir": ".inf"},
        {"run_dir": "2020-01-01"},
        {"run_dir": "1:30"},
        {"run_dir": "0x10"},
        {"run_dir": "~"},
        {"run_dir": "x${seed}"},
        {"run_dir": "${"},
        {"run_dir": "a\\${b}\\"},
        {"validation": {"every": 5}, "data.name": "digits", "ema": None},
        {"model": {"family": "mixture", "path": "edm", "prediction": "x0"}},
        {"model": {"family": "dit", "weights": "some/where"}},
    ],
)
def test_recipes_come_back_from_the_file(make_recipe, tmp_path, method, changes) -> None:
    assert_round_trip(make_recipe(method, changes), tmp_path / "copy.yaml")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "mps"])
def test_devices(make_recipe, device) -> None:
    assert make_recipe("dmd2", {"runtime.device": device}).runtime.device == device


@pytest.mark.parametrize("device", ["quantum", "meta", "cuda:", "cuda:-1", "cpu:0\n", ""])
def test_other_devices_are_refused(recipe_values, device) -> None:
    words = f"runtime.device: {device!r} is given; it should be cpu, cuda, cuda:N or mps"
    assert words in problem(recipe_values("dmd2", {"runtime.device": device}))


def test_explicit_sigmas_come_back_bit_for_bit(make_recipe, tmp_path) -> None:
    sigmas = [1.0, 0.1 + 0.2, 1e-17]
    recipe = make_recipe("dmd2", {"method.steps": 3, "method.sigmas": sigmas})
    assert_round_trip(recipe, tmp_path / "copy.yaml")
    assert recipe.method.grid == tuple(sigmas)


# Fingerprints.


def test_fingerprint_holds_everything_but_what_may_change(make_recipe) -> None:
    recipe = make_recipe("dmd2", {"validation": {"every": 5}, "data.name": "digits"})
    found = fingerprint(recipe)
    assert "optimizers.student.lr" in found
    assert found["model.network.num_layers"] == 1
    for key in MAY_CHANGE:
        assert key in all_keys(Recipe), f"{key} is not a key of the recipe"
        assert not any(k == key or k.startswith(f"{key}.") for k in found)
    same = make_recipe(
        "dmd2",
        {
            "validation": {"every": 9},
            "data.name": "digits",
            "train.cycles": 9,
            "run_dir": "b",
            "logging.every": 2,
        },
    )
    check_fingerprint(found, fingerprint(same), Path("x"))


def test_fingerprints_survive_json(make_recipe) -> None:
    for method in ("dmd2", "flow_matching"):
        found = fingerprint(make_recipe(method, {"optimizers.student.lr": 1 / 3}))
        assert json.loads(json.dumps(found)) == found


def test_keys_that_come_or_go_are_differences() -> None:
    with pytest.raises(UserError) as error:
        check_fingerprint({"a": 1, "b": 2}, {"b": 2, "c": None}, Path("ckpt"))
    assert "  a: was 1, is '(absent)'" in str(error.value)
    assert "  c: was '(absent)', is None" in str(error.value)
    assert "  b:" not in str(error.value)
