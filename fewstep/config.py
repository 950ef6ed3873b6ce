"""The recipe: one YAML file that says everything about a run, checked before anything is loaded."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, final, get_args, get_origin

import omegaconf
import torch
import yaml
from omegaconf import OmegaConf
from pydantic import Field, ValidationError, field_validator, model_validator

from fewstep.data.settings import DATA, BuiltInData, DataSettings
from fewstep.errors import UserError
from fewstep.methods import METHODS, MethodSettings
from fewstep.methods.adversarial import AdversarialSettings
from fewstep.methods.dmd2_settings import DMD2Settings
from fewstep.models import FAMILIES, ModelSettings
from fewstep.parallel.settings import LaunchSettings, ParallelSettings
from fewstep.roles.ema import EMASettings
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import DISCRIMINATOR
from fewstep.roles.storage import LoraSettings, StorageKind
from fewstep.settings import Settings
from fewstep.training.cycle import CycleSettings
from fewstep.training.metrics import LoggingSettings
from fewstep.training.worker import TrainSettings

from fewstep.checkpoint import CheckpointSettings  # isort: skip
from fewstep.placement import PlacementSettings, check_placement  # isort: skip
from fewstep.rollout import RolloutSettings  # isort: skip
from fewstep.validation import ValidationSettings  # isort: skip

MAY_CHANGE = (
    "run_dir",
    "train.cycles",
    "train.micro_batch_size",
    "train.max_skipped_in_a_row",
    "method.score_batching",
    "data.encoded",
    "data.batch_size",
    "checkpoint",
    "logging",
    "validation",
    "runtime.device",
    "runtime.threads",
    "runtime.activation_checkpointing",
    "parallel",
    "launch",
    "placement",
    "rollout.workers",
    "rollout.engine",
    "rollout.bucket_mib",
)


@final
class OptimizersSettings(Settings):
    """One optimizer for each trained role."""

    student: OptimizerSettings
    fake_score: OptimizerSettings | None = Field(
        None, description="needed by the distribution-matching methods"
    )

    discriminator: OptimizerSettings | None = Field(
        None, description="needed by the adversarial head, method.adversarial"
    )

    def by_role(self, among: Container[str] | None = None) -> dict[str, OptimizerSettings]:
        """Role -> settings, of those that are given; `among`: of these roles alone."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        found = {name: value for name, value in given.items() if value is not None}
        return found if among is None else {n: v for n, v in found.items() if n in among}


@final
class RuntimeSettings(Settings):
    """Where and how precisely to compute."""

    device: str = Field("cpu", description="a torch device: cpu, cuda, cuda:1, mps")
    dtype: Literal["float32", "float64"] = Field("float32", description="of weights and arithmetic")
    compute_dtype: Literal["bfloat16"] | None = Field(
        None,
        description="of matrix products, under autocast; weights, gradients and their reduction "
        "stay in dtype. null: dtype",
    )
    activation_checkpointing: bool = Field(
        False, description="recompute each block in the backward pass instead of remembering it"
    )
    threads: Annotated[int, Field(gt=0)] | None = Field(
        None, description="CPU threads; null: torch's own choice"
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`, as torch's own."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def torch_compute_dtype(self) -> torch.dtype | None:
        """`compute_dtype`, as torch's own."""
        return getattr(torch, self.compute_dtype) if self.compute_dtype is not None else None

    @model_validator(mode="after")
    def _check_compute(self) -> RuntimeSettings:
        if self.compute_dtype is not None and self.dtype == "float64":
            raise ValueError(
                f"compute_dtype: {self.compute_dtype!r} would throw away what dtype 'float64' is "
                f"for; use dtype 'float32'"
            )
        return self

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:[0-9]+)?|mps", device):
            raise ValueError(f"{device!r} is given; it should be cpu, cuda, cuda:N or mps")
        return device


@final
class Recipe(Settings):
    """A whole run."""

    seed: Annotated[int, Field(ge=0)] = Field(0, description="of all random numbers of the run")
    run_dir: str = Field("runs/unnamed", description="where the run is written")
    model: ModelSettings
    data: DataSettings = BuiltInData()
    method: MethodSettings
    storage: StorageKind = Field(
        "independent",
        description="independent: a network for every role; shared_base: LoRA adapters on one "
        "frozen base",
    )
    lora: LoraSettings | None = Field(None, description="for storage: shared_base")
    optimizers: OptimizersSettings
    ema: EMASettings | None = Field(None, description="null: no student_ema")
    cycle: CycleSettings = CycleSettings()
    train: TrainSettings
    validation: ValidationSettings | None = Field(None, description="null: no validation")
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    parallel: ParallelSettings = ParallelSettings()
    launch: LaunchSettings = LaunchSettings()
    placement: PlacementSettings = PlacementSettings()
    rollout: RolloutSettings = RolloutSettings()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        method = self.method.build()
        optimizers = set(self.optimizers.by_role())
        needed = set(method.trained_roles)
        head = getattr(self.method, "adversarial", None)
        alone = head is not None and head.trained_with == DISCRIMINATOR
        # One that is turned off by its weight may keep its optimizer in the recipe.
        idle = {DISCRIMINATOR} if alone else set()
        if head is not None and not alone and DISCRIMINATOR in optimizers:
            raise ValueError(
                f"optimizers.discriminator: method.adversarial.trained_with is "
                f"{head.trained_with!r}, so optimizers.{head.trained_with} trains the classifier "
                f"as well; leave it out, or give null"
            )
        if not needed <= optimizers <= needed | idle:
            raise ValueError(
                f"optimizers: method {method.name!r} trains {', '.join(method.trained_roles)}, "
                f"but optimizers are given for {', '.join(sorted(optimizers))}"
            )
        if self.storage == "shared_base" and self.lora is None:
            raise ValueError("lora: storage 'shared_base' needs it, for example lora={rank: 16}")
        if self.storage != "shared_base" and self.lora is not None:
            raise ValueError(f"lora: only for storage 'shared_base'; storage is {self.storage!r}")
        if (
            isinstance(self.method, DMD2Settings)
            and self.method.score_batching == "fused"
            and self.storage != "shared_base"
        ):
            raise ValueError(
                f"method.score_batching: 'fused' needs storage 'shared_base': one network call for "
                f"several roles needs one network that holds them; storage is {self.storage!r}, "
                f"so use 'separate'"
            )
        if method.fake_updates_per_student == 0 and self.cycle != CycleSettings():
            raise ValueError(f"cycle: method {method.name!r} has no fake_score phases to arrange")
        if method.needs_data and self.data.name == "none":
            what = f"method {method.name!r}" if not head else "the classifier, method.adversarial,"
            raise ValueError(f"data.name: {what} trains on data; 'none' is given")
        self._check_adversarial()
        if self.cycle.warmup_cycles >= self.train.cycles:
            raise ValueError(
                f"cycle.warmup_cycles ({self.cycle.warmup_cycles}) must be below train.cycles "
                f"({self.train.cycles}): the student would never be trained"
            )
        try:
            check_placement(
                self.placement,
                self.launch,
                self.rollout,
                self.cycle,
                method,
                self.roles,
                self.runtime.device,
            )
        except UserError as error:
            raise ValueError(str(error)) from error
        return self

    def _check_adversarial(self) -> None:
        """What sharding does not know: derivatives of derivatives; FSDP1: graphs within graphs."""
        if self.classifier is None:
            return
        if self.parallel.kind == "fsdp1" and self.storage == "shared_base":
            raise ValueError(
                "method.adversarial: parallel.kind 'fsdp1' cannot run a backward pass through a "
                "base on which the student's own is still to come, as storage 'shared_base' needs; "
                "use parallel.kind 'fsdp2', or storage 'independent'"
            )
        r1 = self.classifier.r1
        if r1 is not None and r1.kind == "exact" and self.parallel.kind in ("fsdp1", "fsdp2"):
            raise ValueError(
                f"method.adversarial.r1.kind: 'exact' differentiates twice through the networks, "
                f"which parallel.kind {self.parallel.kind!r} cannot; use 'approximate', or "
                f"parallel.kind 'none' or 'ddp'"
            )

    @property
    def classifier(self) -> AdversarialSettings | None:
        """The method's adversarial head, where it has one that is on."""
        return self.method.classifier if isinstance(self.method, DMD2Settings) else None

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles of the run."""
        return self.method.build().roles + (("student_ema",) if self.ema is not None else ())


def load_recipe(file: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides.

    Raises:
        UserError: naming file, key and value, and what would be right.
    """
    file = Path(file)
    if not file.is_file():
        near = sorted(str(f) for f in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        hint = f"; there are: {', '.join(near)}" if near else ""
        raise UserError(f"the recipe {file} does not exist{hint}")
    try:
        loaded = OmegaConf.load(file)
        merged = OmegaConf.merge(loaded, parse_overrides(overrides))
        values = OmegaConf.to_container(merged, resolve=True)
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {error}") from error
    except (omegaconf.errors.OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {error}") from error
    except TypeError as error:
        raise UserError(f"{file}: a recipe is a mapping of sections: {error}") from error
    return parse_recipe(values, str(file))


def parse_overrides(overrides: Iterable[str]) -> omegaconf.DictConfig:
    """Dotted `key=value` pairs, the values as YAML; raises UserError for anything else."""
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key or key.startswith("-"):
            raise UserError(
                f"{override!r} is not an override: write key=value, as in train.cycles=100"
            )
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, ValueError) as error:
        raise UserError(f"the overrides {list(overrides)} cannot be read: {error}") from error


def parse_recipe(values: Any, source: str = "recipe") -> Recipe:
    """Check plain data against the recipe's models; `source` is named in errors.

    Raises:
        UserError: with one line for each thing that is wrong.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: a recipe is a mapping of sections, not {values!r}")
    try:
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as error:
        lines = [describe_problem(dict(problem)) for problem in error.errors()]
        raise UserError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{source}: {error}") from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads."""
    values = escape_interpolations(recipe.model_dump(mode="json"))
    return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False)


def escape_interpolations(values: Any) -> Any:
    """Plain data with every `${` of its texts written as what OmegaConf reads as just that."""
    if isinstance(values, dict):
        return {key: escape_interpolations(value) for key, value in values.items()}
    if isinstance(values, list):
        return [escape_interpolations(value) for value in values]
    if isinstance(values, str) and "${" in values:
        # Backslashes count only before an interpolation, and at the end of such a text.
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", values)
    return values


@final
class RecipeDumper(yaml.SafeDumper):
    """Quotes text that OmegaConf, unlike PyYAML, would read as a number, such as 1e5."""


RecipeDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9_.]*[0-9][0-9_.]*[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


# Sections of which there are several kinds: the key that tells them apart, and its values.
UNIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "model": ("family", FAMILIES),
    "method": ("name", METHODS),
    "data": ("name", DATA),
}

PLAIN_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "an object": "a section of keys",
}


def describe_problem(problem: dict[str, Any]) -> str:
    """One validation problem in words: key, value, and what would be right."""
    location, tag = [str(part) for part in problem["loc"]], None
    if len(location) > 1 and location[0] in UNIONS:
        tag = location.pop(1)
    key = ".".join(location) or "recipe"
    if problem["type"] == "extra_forbidden":
        return f"{key}: there is no such key{suggest(location, tag)}"
    if problem["type"] == "missing":
        return f"{key}: is missing"
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        field, known = UNIONS[location[0]]
        given = (problem.get("input") or {}).get(field)
        return f"{key}.{field}: {given!r} is not one of {', '.join(known)}"
    if problem["type"] == "too_short":
        least, given = problem["ctx"]["min_length"], problem["ctx"]["actual_length"]
        return f"{key}: has {given} entries; it needs at least {least}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = PLAIN_WORDS.get(message, message)
    if problem["type"] == "value_error":
        return message if key == "recipe" else f"{key}: {message}"
    return f"{key}: {problem.get('input')!r} is given; it should be {message}"


def suggest(location: Sequence[str], tag: str | None = None) -> str:
    """Which key may have been meant: a sibling, or one of that name elsewhere.

    `tag`: the method, model family or kind of data that the recipe has chosen; keys of others do
    not count.
    """
    keys, wrong, top = all_keys(Recipe), location[-1], location[0]
    chosen = UNIONS[top][1].get(tag or "") if top in UNIONS else None
    if chosen is not None:
        keys = [k for k in keys if not k.startswith(f"{top}.")] + all_keys(chosen, f"{top}.")
    parent = ".".join(location[:-1])
    names = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(keys)}
    for known, cutoff in ((names, 0.75), (elsewhere, 1.0), (names, 0.6), (elsewhere, 0.8)):
        if close := difflib.get_close_matches(wrong, known, n=1, cutoff=cutoff):
            return f"; did you mean {known[close[0]]}?"
    return f"; known here: {', '.join(sorted(names))}" if names else ""


def all_keys(settings: type[Settings], prefix: str = "") -> list[str]:
    """Every dotted key below a settings model, all families and methods included."""
    keys = []
    for name, field in settings.model_fields.items():
        keys.append(prefix + name)
        for section in settings_in(field.annotation):
            keys += all_keys(section, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


def settings_in(annotation: Any) -> list[type[Settings]]:
    """The settings models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if get_origin(annotation) in (Literal, None):
        return []
    return [found for part in get_args(annotation) for found in settings_in(part)]


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """What must not change between a run and its resume: flat, key -> value."""

    def flatten(values: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(values, dict):
            return {prefix: values}
        found: dict[str, Any] = {}
        for key, value in values.items():
            found |= flatten(value, f"{prefix}.{key}" if prefix else key)
        return found

    flat = flatten(recipe.model_dump(mode="json"), "")
    return {
        key: value
        for key, value in flat.items()
        if not any(key == k or key.startswith(f"{k}.") for k in MAY_CHANGE)
    }


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any], where: Path) -> None:
    """Raise UserError listing every key whose value differs from that of the saved run."""
    changed = [
        f"  {key}: was {saved.get(key, '(absent)')!r}, is {current.get(key, '(absent)')!r}"
        for key in sorted({*saved, *current})
        if saved.get(key, ...) != current.get(key, ...)
    ]
    if changed:
        raise UserError(
            f"{where} was trained with another recipe; a resumed run must not change:\n"
            + "\n".join(changed)
            + "\nTake the old values, or start a new run directory"
        )
