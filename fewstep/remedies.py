"""What would make a recipe fit into the memory there is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from fewstep.budget import Estimator, differentiates_twice
from fewstep.config import Recipe, parse_recipe
from fewstep.errors import UserError
from fewstep.memory import Devices, RankMemory

MORE_RANKS = (2, 4, 8, 16, 32, 64)
SHARDED = {"parallel.kind": "fsdp2"}
APPROXIMATE = {"method.adversarial.r1.kind": "approximate"}


@final
@dataclass(frozen=True)
class Remedy:
    """A change of a recipe that needs less memory.

    Attributes:
        words: what it is, in the words of a recipe.
        ranks: how many ranks there are then.
        memory: of the fullest one.
    """

    words: str
    ranks: int
    memory: RankMemory


def remedies(estimator: Estimator, devices: Devices) -> list[Remedy]:
    """Changes after which a recipe fits; each is enough by itself.

    The cheap ones together stand for one where none of them is enough.
    """
    found = [r for r in _single_changes(estimator, devices) if r.memory.total <= devices.bytes]
    if found:
        return found
    together = [r for r in _joint_changes(estimator, devices) if r.memory.total <= devices.bytes]
    return together[:1]


def _cheap_changes(recipe: Recipe) -> list[dict[str, Any]]:
    """Those that change no result but by rounding, and need no more devices."""
    changes: list[dict[str, Any]] = []
    if not recipe.runtime.activation_checkpointing:
        changes.append({"runtime.activation_checkpointing": True})
    if recipe.runtime.compute_dtype is None and recipe.runtime.dtype == "float32":
        changes.append({"runtime.compute_dtype": "bfloat16"})
    if (recipe.train.micro_batch_size or recipe.train.batch_size) > 1:
        one = {"train.micro_batch_size": 1}
        # Else whole gradients would add up over the micro-batches.
        each = {"parallel.reduce_each_micro_batch": True} if recipe.parallel.sharded else {}
        changes.append(one | each)
    return changes


def _single_changes(estimator: Estimator, devices: Devices) -> Iterator[Remedy]:
    recipe = estimator.recipe
    for change in _cheap_changes(recipe):
        yield from _changed(estimator, change, devices)
    for ranks in _spread_over(recipe, devices):
        enough = next(_changed(estimator, _sharded(recipe), devices, ranks), None)
        if enough is not None and enough.memory.total <= devices.bytes:
            yield enough
            break
    if differentiates_twice(recipe):
        yield from _changed(estimator, APPROXIMATE, devices)
    if recipe.lora is None:
        yield from _changed(estimator, _lora(), devices)
    resolution = getattr(recipe.model, "resolution", None)
    if resolution is not None:
        yield from _changed(estimator, {"model.resolution": resolution // 2}, devices)


def _joint_changes(estimator: Estimator, devices: Devices) -> Iterator[Remedy]:
    recipe, cheap = estimator.recipe, dict[str, Any]()
    for change in _cheap_changes(recipe):
        cheap |= change
    if differentiates_twice(recipe):
        cheap |= APPROXIMATE
    lora = _lora() if recipe.lora is None else {}
    sharded = cheap | _sharded(recipe)
    yield from _changed(estimator, cheap, devices)
    yield from _changed(estimator, cheap | lora, devices)
    for ranks in _spread_over(recipe, devices):
        yield from _changed(estimator, sharded, devices, ranks)
        yield from _changed(estimator, sharded | lora, devices, ranks)


def _spread_over(recipe: Recipe, devices: Devices) -> Iterator[int | None]:
    """Numbers of ranks to shard the networks over; None: as many as there are devices."""
    if devices.count > 1 and not recipe.parallel.sharded:
        yield None
    yield from (n for n in MORE_RANKS if n > devices.count)


def _sharded(recipe: Recipe) -> dict[str, Any]:
    """What shards the networks, if they are not."""
    return {} if recipe.parallel.sharded else SHARDED


def _lora() -> dict[str, Any]:
    return {"storage": "shared_base", "lora": {"rank": 16}}


def _changed(
    estimator: Estimator, changes: Mapping[str, Any], devices: Devices, ranks: int | None = None
) -> Iterator[Remedy]:
    """The estimate of a changed recipe; nothing where the change cannot be.

    Args:
        estimator: of the recipe as it is.
        changes: dotted keys and their values.
        devices: those that there are.
        ranks: if on more of them.
    """
    values = estimator.recipe.model_dump(mode="json")
    for key, value in changes.items():
        *sections, last = key.split(".")
        functools.reduce(dict.__getitem__, sections, values)[last] = value
    try:
        recipe = parse_recipe(values)
        rebuilt = any(not k.startswith(("runtime", "train", "parallel")) for k in changes)
        other = Estimator(recipe) if rebuilt else estimator
        memory = other.on(ranks or devices.count, recipe)
    except UserError:
        return
    words = [f"{key}={_write(value)}" for key, value in changes.items()]
    if ranks is not None:
        words.append(f"on {ranks} GPUs")
    yield Remedy(" ".join(words), ranks or devices.count, memory)


def _write(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
