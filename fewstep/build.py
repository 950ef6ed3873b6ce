"""From a recipe to the roles, the method and the data of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fewstep.config import Recipe
from fewstep.data.batches import BatchSource, batch_source
from fewstep.data.dataset import Dataset
from fewstep.data.items import Items
from fewstep.errors import UserError
from fewstep.models.model import Model, Pretrained, empty_network
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.parallel.sharding import (
    Replicated,
    Sharding,
    build_sharding,
    check_shard_size,
    spread,
)
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import DISCRIMINATOR, Roles, mark_trained
from fewstep.roles.storage import Storage, build_independent, build_shared_base
from fewstep.training.worker import Worker


def build_worker(
    recipe: Recipe,
    model: Model,
    dataset: Items | None,
    teacher: Pretrained | None,
    ranks: Ranks = SINGLE,
    roles: Sequence[str] | None = None,
    trained: bool = True,
) -> Worker:
    """Roles, method and data of a run.

    Args:
        recipe: resolved.
        model: the adapter.
        dataset: what the method trains on, and prompts.
        teacher: the network that all roles start from; None where a checkpoint follows.
        ranks: that share the run.
        roles: those that live here; None: all of the recipe's.
        trained: whether they have optimizers, those that have one in the recipe.

    Raises:
        UserError: where method and model do not fit each other, or the ranks the recipe.
    """
    method = recipe.method.build()
    method.check(model)
    check_ranks(recipe, ranks)
    names = tuple(roles if roles is not None else recipe.roles)
    optimizers = recipe.optimizers.by_role(names) if trained else {}
    dtype, compute_dtype = recipe.runtime.torch_dtype, recipe.runtime.torch_compute_dtype
    structure = teacher.network if teacher is not None else empty_network(model.build_network)
    with seeded(recipe.seed, "roles"):
        storage = build_storage(recipe, model, structure, names)
    mark_trained(storage, names, optimizers)
    sharding = build_sharding(recipe.parallel, ranks, compute_dtype)
    spread(
        storage,
        sharding,
        model.blocks,
        teacher.weights if teacher is not None else None,
        dtype=dtype,
        compute_dtype=compute_dtype,
        recompute=recipe.runtime.activation_checkpointing,
    )
    sharding.wrap(storage, names, list(optimizers))
    built = build_roles(recipe, model, storage, names, ranks.device, sharding, optimizers)
    batches = build_batches(recipe, model, dataset, ranks.device, dtype)
    return Worker(recipe.seed, recipe.train, method, built, batches, sharding)


def build_batches(
    recipe: Recipe,
    model: Model,
    dataset: Items | None,
    device: torch.device,
    dtype: torch.dtype,
) -> BatchSource:
    """Where a run's phases get their samples from; equal in all of its processes."""
    items = items_for(recipe, model, dataset)
    needs_data = recipe.method.build().needs_data
    return batch_source(items, model.classes, device, dtype, samples=needs_data)


def check_ranks(recipe: Recipe, ranks: Ranks) -> None:
    """Raise UserError where a recipe cannot be run by so many processes."""
    asked = recipe.launch.processes
    if asked not in (1, ranks.size):
        raise UserError(
            f"launch.processes: {asked} is given, but there are {ranks.size} processes; leave it "
            f"out under torchrun, or start the run with `fewstep train`"
        )
    if recipe.train.batch_size < ranks.size:
        raise UserError(
            f"train.batch_size: {recipe.train.batch_size} is given for {ranks.size} ranks; each "
            f"needs a sample at least"
        )
    check_shard_size(recipe.parallel, ranks.size)


def build_roles(
    recipe: Recipe,
    model: Model,
    storage: Storage,
    names: Sequence[str],
    device: torch.device,
    sharding: Sharding | None = None,
    optimizers: Mapping[str, OptimizerSettings] | None = None,
) -> Roles:
    """Some roles of a run over their networks; `optimizers`: by default those of the recipe."""
    if optimizers is None:
        optimizers = recipe.optimizers.by_role(names)
    return Roles(
        model,
        storage,
        names,
        optimizers,
        recipe.ema,
        device=device,
        dtype=recipe.runtime.torch_dtype,
        align=(sharding or Replicated()).aligned,
    )


def build_storage(
    recipe: Recipe, model: Model, teacher: nn.Module, roles: Sequence[str]
) -> Storage:
    """The physical networks that some roles of a run need."""
    owner = recipe.classifier.trained_with if recipe.classifier is not None else None
    head = build_head(recipe, model, teacher) if owner in roles else None
    denoisers = [role for role in roles if role != DISCRIMINATOR]
    if recipe.lora is None:
        storage: Storage = build_independent(model, teacher, denoisers)
    else:
        adapters = [role for role in denoisers if role != "teacher_score"]
        storage = build_shared_base(model, teacher, adapters, recipe.lora)
    if head is not None and owner is not None:
        storage.add_head(DISCRIMINATOR, head, owner)
    return storage


def build_head(recipe: Recipe, model: Model, teacher: nn.Module) -> nn.Module:
    """The classifier of a run's adversarial head, the same whatever roles live beside it."""
    assert recipe.classifier is not None
    with seeded(recipe.seed, DISCRIMINATOR):
        return recipe.classifier.build_head(model, teacher).eval()


def items_for(recipe: Recipe, model: Model, given: Items | None) -> Items | None:
    """The items that a run learns from, as its networks see them; None where it needs none.

    Args:
        recipe: resolved.
        model: the adapter; it learns from the items what stands for no prompt.
        given: the data set, as it was loaded.

    Raises:
        UserError: where data and network do not fit each other.
    """
    if model.prompted != (given is not None and given.prompts is not None):
        if not model.prompted:
            raise UserError(f"data.name: {recipe.data.name!r} has prompts, the network takes none")
        if given is not None or recipe.data.name == "none":
            raise UserError(
                f"data.name: {recipe.data.name!r} is given, but the network takes prompts"
            )
    if given is None:
        return None
    if given.unconditional:
        model.take_unconditional(given.unconditional)
    if not recipe.method.build().needs_data:
        return given
    if not given.has_samples:
        raise UserError(
            f"data: method {recipe.method.name!r} trains on samples, and these are prompts alone"
        )
    if isinstance(given, Dataset):
        given = Dataset(model.encode(given.samples), given.labels)
        check_labels_fit(model, given)
    shape = tuple(given.x0(torch.tensor([0])).shape[1:])
    if shape != tuple(model.sample_shape):
        raise UserError(
            f"data: samples have shape {shape}, the network takes {tuple(model.sample_shape)}"
        )
    return given


def check_labels_fit(model: Model, dataset: Dataset) -> None:
    """Raise UserError unless a data set has just the class labels that the network takes."""
    if dataset.labels is not None and model.classes is not None:
        highest = int(dataset.labels.max())
        if highest >= model.classes:
            raise UserError(f"data: label {highest} is too high for {model.classes} classes")
    if (dataset.labels is None) != (model.classes is None):
        raise UserError("data: labels are needed by a class-conditional network, and only there")


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Key torch's global generator for the block, and restore it afterwards."""
    key = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also seed every accelerator for good.
        torch.default_generator.manual_seed(int.from_bytes(key, "little") >> 1)
        yield
