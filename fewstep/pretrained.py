"""The network that a run starts from, and one role of a run by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fewstep.build import build_storage, seeded
from fewstep.checkpoint import (
    best_checkpoint,
    complete_checkpoints,
    latest_checkpoint,
    load_network,
    read_best,
)
from fewstep.config import Recipe, load_recipe
from fewstep.errors import UserError
from fewstep.models import ModelSettings
from fewstep.models.files import exported_shift
from fewstep.models.model import Model, Pretrained, SizedByWeights, empty_network, pretrained
from fewstep.models.sd3 import SD3Settings
from fewstep.parallel.ranks import CPU, SINGLE, Ranks
from fewstep.parallel.sharding import Replicated, spread
from fewstep.roles.role import STUDENT, TEACHER_SCORE, Roles
from fewstep.validation import sampled_role

Which = Literal["latest", "best"]
RECIPE = "recipe.yaml"


def is_run_directory(path: Path) -> bool:
    """Whether a run has been started there."""
    return (path / RECIPE).is_file()


def check_run_directory(path: Path) -> None:
    """Raise UserError unless a run has been started there."""
    if not is_run_directory(path):
        raise UserError(f"{path} is not a run directory: it has no {RECIPE}")


def find_checkpoint(directory: Path, which: Which | None) -> Path:
    """The latest or the best checkpoint; None: the best, or the latest of a run never validated."""
    if which is None:
        which = "best" if read_best(directory) is not None else "latest"
    return best_checkpoint(directory) if which == "best" else latest_checkpoint(directory)


def resolve_recipe(recipe: Recipe, resumed: Recipe | None = None) -> Recipe:
    """Fill in what is decided elsewhere: the network by the teacher's weights, the grid by steps.

    A grid of which neither sigmas nor shift are given has the shift that the weights are sampled
    with: that of their run, or of the schedule in their pipeline.

    Args:
        recipe: as it is given.
        resumed: the resolved one of a run that is gone on with. It knows the network of the same
            weights, which are not looked at then: they may be gone.

    Raises:
        UserError: where the weights do not exist or contradict the recipe, or their schedule is
            needed and cannot be read.
    """
    settings, method = resolve_model(recipe, resumed), recipe.method
    shift = None if method.grid_given else _own_shift(settings, resumed)
    return recipe.model_copy(update={"model": settings, "method": method.resolved(shift)})


def resolve_model(recipe: Recipe, resumed: Recipe | None = None) -> ModelSettings:
    """The part of `resolve_recipe` that is about the network."""
    settings = recipe.model
    if not isinstance(settings, SizedByWeights) or settings.weights is None:
        return settings
    source = Path(settings.weights)
    trained: ModelSettings | None = None
    if resumed is not None and resumed.model.weights == settings.weights:
        source, trained = Path(resumed.run_dir), resumed.model
    elif is_run_directory(source):
        trained = load_recipe(source / RECIPE).model
    if trained is not None:
        if type(trained) is not type(settings):
            raise UserError(
                f"model.family is {settings.family!r}, but {source} was trained with "
                f"{trained.family!r}"
            )
        for key in settings.model_fields_set - settings.chosen_anew:
            given, value = getattr(settings, key), getattr(trained, key, None)
            if given is not None and given != value:
                raise UserError(
                    f"model.{key} is {given!r}, but {source} was trained with {value!r}"
                )
        anew = settings.model_fields_set & settings.chosen_anew
        return trained.model_copy(update={key: getattr(settings, key) for key in anew})
    return settings.with_network_of(source)


def _own_shift(settings: ModelSettings, resumed: Recipe | None) -> float | None:
    """Shift of the grid that weights are sampled on; None where there are none, or none is known.

    A run that is gone on with has taken it over; the weights may be gone.
    """
    if not isinstance(settings, SizedByWeights) or settings.weights is None:
        return None
    if resumed is not None and resumed.model.weights == settings.weights:
        return resumed.method.grid_shift
    source = Path(settings.weights)
    if is_run_directory(source):
        return load_recipe(source / RECIPE).method.grid_shift
    if isinstance(settings, SD3Settings) and settings.pipeline is not None:
        return settings.build().schedule_shift()
    return exported_shift(source)


def load_weights(recipe: Recipe, model: Model, ranks: Ranks = SINGLE) -> Pretrained:
    """The network that a run starts from: the weights of the recipe, or new ones by its seed.

    Only rank 0 reads them, or makes new ones; the others know the structure.
    """
    source = recipe.model.weights
    if source is None or is_run_directory(Path(source)):
        if not ranks.first:
            return Pretrained(empty_network(model.build_network), {})
        if source is not None:
            return pretrained(open_network(Path(source), model))
        with seeded(recipe.seed, "network"):
            return pretrained(model.build_network())
    return model.open_network(Path(source))


def open_network(directory: Path, model: Model) -> nn.Module:
    """The network that a run has trained, whole and plain; nothing else of the run is read.

    Raises:
        UserError: where there is no complete checkpoint, or it is damaged.
    """
    if not complete_checkpoints(directory):
        raise UserError(
            f"model.weights: the run {directory} has no complete checkpoint yet; train it first"
        )
    recipe = load_recipe(directory / RECIPE)
    role = sampled_role(recipe.roles)
    roles = open_role(recipe, model, role, find_checkpoint(directory, None))
    return roles.storage.plain_network(role)


def open_role(
    recipe: Recipe,
    model: Model,
    role: str,
    checkpoint: Path,
    device: torch.device = CPU,
    compute_dtype: torch.dtype | None = None,
) -> Roles:
    """One role of a run; networks that it does not need, and optimizers, are not read.

    Args:
        recipe: of the run.
        model: the adapter.
        role: a denoiser.
        checkpoint: of the run.
        device: where its network shall be.
        compute_dtype: of matrix products, where it is another than the weights'.

    Raises:
        UserError: where the checkpoint is damaged, or of another network.
    """
    # A shared base is built with an adapter at least; that of the student is there as well.
    bare = recipe.lora is not None and role == TEACHER_SCORE
    names, dtype = (role, STUDENT) if bare else (role,), recipe.runtime.torch_dtype
    with seeded(recipe.seed, "roles"):
        storage = build_storage(recipe, model, empty_network(model.build_network), names)
    spread(
        storage,
        Replicated(Ranks(0, 1, device, grouped=False)),
        model.blocks,
        None,
        dtype=dtype,
        compute_dtype=compute_dtype,
    )
    roles = Roles(model, storage, names, {}, device=device, dtype=dtype)
    name = storage.network_of(role)
    load_network(checkpoint, name, storage.tensors[name], partial=recipe.lora is not None)
    return roles
