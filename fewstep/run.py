"""A run: its recipe, networks and checkpoints; made anew or opened from its directory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor, nn

from fewstep.checkpoint import (
    best_checkpoint,
    complete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_network,
    read_best,
)
from fewstep.config import Recipe, load_recipe
from fewstep.data.batches import BatchSource, batch_source
from fewstep.data.conditions import Conditions, conditions_in_turn, label_conditions
from fewstep.data.dataset import Dataset
from fewstep.data.items import Items, JoinedItems
from fewstep.errors import UserError
from fewstep.methods.method import Method, SamplerSpec
from fewstep.models import ModelSettings
from fewstep.models.model import (
    Model,
    Pretrained,
    SizedByWeights,
    empty_network,
    pretrained,
)
from fewstep.parallel.materialize import Filler
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.parallel.settings import LaunchSettings, ParallelSettings
from fewstep.parallel.sharding import Replicated, Sharding, build_sharding, spread
from fewstep.placement import PlacementSettings
from fewstep.roles.role import DISCRIMINATOR, Roles, mark_trained
from fewstep.roles.storage import Storage, build_independent, build_shared_base
from fewstep.rollout import RolloutSettings
from fewstep.sampling import Samples, cpu_threads, sample_role
from fewstep.training.metrics import logger
from fewstep.training.worker import Worker
from fewstep.validation import sampled_role

Which = Literal["latest", "best"]
RECIPE = "recipe.yaml"


@final
@dataclass(frozen=True)
class Run:
    """A run with its networks in memory.

    Attributes:
        directory: where it is written.
        recipe: resolved.
        worker: holds roles and method.
        cycle: the last one that the weights have seen.
        cycles_run: how many of them were run by this call of `train`.
        items: whose prompts its samples have, where the network takes any.
    """

    directory: Path
    recipe: Recipe
    worker: Worker
    cycle: int
    cycles_run: int = 0
    items: Items | None = None

    @property
    def roles(self) -> Roles:
        """The roles and their networks."""
        return self.worker.roles

    @property
    def method(self) -> Method:
        """The method that trained them."""
        return self.worker.method

    @property
    def complete(self) -> bool:
        """Whether all cycles of the recipe are done."""
        return self.cycle >= self.recipe.train.cycles

    @property
    def result_role(self) -> str:
        """The role that stands for the result: student_ema where there is one."""
        return sampled_role(self.roles)

    def sample(
        self,
        count: int | None = None,
        *,
        classes: list[int] | Tensor | None = None,
        steps: int | None = None,
        role: str | None = None,
        seed: int = 0,
        spec: SamplerSpec | None = None,
    ) -> Samples:
        """Sample a role, by default the result on the grid it was trained for.

        Args:
            count: number of samples, by default 16, where no classes are given.
            classes: a label for each sample; by default 0, 1, 2, ... in turn.
            steps: another number of steps than the trained one.
            role: whose network.
            seed: of the noise.
            spec: a sampler of your own instead of `steps`.

        Raises:
            ValueError: where the classes do not fit the network, or the count.
        """
        conditions = self.conditions(count or 16)
        if classes is not None:
            conditions = label_conditions(torch.as_tensor(classes))
            if count not in (None, len(conditions)):
                raise ValueError(f"{count} samples are asked for, but {len(conditions)} classes")
        sampler = spec or self.method.sampler(steps)
        with cpu_threads(self.recipe.runtime.threads):
            return sample_role(
                self.roles,
                role or self.result_role,
                sampler,
                conditions,
                seed=seed,
                ranks=self.worker.ranks,
            )

    def conditions(self, count: int) -> Conditions:
        """Of samples that stand for all: prompts, those held out first, or classes, in turn."""
        return conditions_in_turn(self.roles.model.classes, self.items, count)


@final
@dataclass(frozen=True)
class Trained:
    """What became of a run whose networks were in other processes.

    Attributes:
        directory: where it is written.
        recipe: resolved.
        cycle: the last one that was done.
        cycles_run: how many of them by this call.
    """

    directory: Path
    recipe: Recipe
    cycle: int
    cycles_run: int

    @property
    def complete(self) -> bool:
        """Whether all cycles of the recipe are done."""
        return self.cycle >= self.recipe.train.cycles


def is_run_directory(path: Path) -> bool:
    """Whether a run has been started there."""
    return (path / RECIPE).is_file()


def open_run(
    directory: Path | str, which: Which | None = "latest", model: Model | None = None
) -> Run:
    """Open a run directory at its latest or best checkpoint.

    Args:
        directory: of the run.
        which: "latest" or "best" (by validation); None: the best if it was validated.
        model: the adapter, for a network that was passed in from Python.

    Raises:
        UserError: where there is no run, no such checkpoint, or it is damaged.
    """
    directory = Path(directory)
    if not is_run_directory(directory):
        raise UserError(f"{directory} is not a run directory: it has no {RECIPE}")
    recipe = load_recipe(directory / RECIPE)
    checkpoint = find_checkpoint(directory, which)
    model = model or recipe.model.build()
    items = None
    try:
        items = prompts_to_sample(recipe, model)
    except UserError as error:  # prompts of one's own can be sampled all the same
        logger.warning("%s", error)
    # However it was trained: a run is opened whole, by one process.
    worker = build_worker(for_one_process(recipe), model, None, teacher=None)
    state = load_checkpoint(checkpoint, worker.empty_state)
    worker.load_state_dict(state)
    return Run(directory, recipe, worker, state["cycle"], items=items)


def for_one_process(recipe: Recipe) -> Recipe:
    """The same run without anything that concerns other processes."""
    return recipe.model_copy(
        update={
            "parallel": ParallelSettings(),
            "launch": LaunchSettings(),
            "placement": PlacementSettings(),
            "rollout": RolloutSettings(),
        }
    )


def open_result(directory: Path | str, model: Model | None = None) -> Run:
    """Open a run at its best checkpoint, or at the latest where it was never validated."""
    return open_run(directory, None, model)


def find_checkpoint(directory: Path, which: Which | None) -> Path:
    """The latest or the best checkpoint; None: the best, or the latest of a run never validated."""
    if which is None:
        which = "best" if read_best(directory) is not None else "latest"
    return best_checkpoint(directory) if which == "best" else latest_checkpoint(directory)


def resolve_recipe(recipe: Recipe, resumed: Recipe | None = None) -> Recipe:
    """Fill in what is decided elsewhere: the network by the teacher's weights, the grid by steps.

    Args:
        recipe: as it is given.
        resumed: the resolved one of a run that is gone on with. It knows the network of the same
            weights, which are not looked at then: they may be gone.

    Raises:
        UserError: where the weights do not exist or contradict the recipe.
    """
    recipe = recipe.model_copy(update={"method": recipe.method.resolved()})
    settings = recipe.model
    if not isinstance(settings, SizedByWeights) or settings.weights is None:
        return recipe
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
        settings = trained.model_copy(update={key: getattr(settings, key) for key in anew})
    else:
        settings = settings.with_network_of(source)
    return recipe.model_copy(update={"model": settings})


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
    recipe, checkpoint = load_recipe(directory / RECIPE), find_checkpoint(directory, None)
    with seeded(recipe.seed, "roles"):
        structure = empty_network(model.build_network)
        storage = build_storage(recipe, model, structure, recipe.roles)
    role = sampled_role(recipe.roles)
    name = storage.network_of(role)
    network = storage.networks[name]
    filler = Filler(SINGLE, getattr(torch, recipe.runtime.dtype), None, storage.source_key)
    Replicated().shard(storage, name, model.blocks, filler)
    load_network(checkpoint, name, storage.tensors[name])
    storage.networks = {name: network}
    return storage.plain_network(role)


def build_worker(
    recipe: Recipe,
    model: Model,
    dataset: Items | None,
    teacher: Pretrained | None,
    ranks: Ranks = SINGLE,
    roles: Sequence[str] | None = None,
) -> Worker:
    """Roles, method and data of a run.

    Args:
        recipe: resolved.
        model: the adapter.
        dataset: what the method trains on, and prompts.
        teacher: the network that all roles start from; None where a checkpoint follows.
        ranks: that share the run.
        roles: those that live here; None: all of the recipe's.

    Raises:
        UserError: where method and model do not fit each other, or the ranks the recipe.
    """
    method = recipe.method.build()
    method.check(model)
    check_ranks(recipe, ranks)
    names = tuple(roles if roles is not None else recipe.roles)
    optimizers = {k: v for k, v in recipe.optimizers.by_role().items() if k in names}
    dtype = getattr(torch, recipe.runtime.dtype)
    compute = recipe.runtime.compute_dtype
    compute_dtype = getattr(torch, compute) if compute is not None else None
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
    built = build_roles(recipe, model, storage, names, ranks.device, sharding)
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


def build_roles(
    recipe: Recipe,
    model: Model,
    storage: Storage,
    names: Sequence[str],
    device: torch.device,
    sharding: Sharding | None = None,
) -> Roles:
    """Some roles of a run over their networks."""
    return Roles(
        model,
        storage,
        names,
        {k: v for k, v in recipe.optimizers.by_role().items() if k in names},
        recipe.ema,
        device=device,
        dtype=getattr(torch, recipe.runtime.dtype),
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


def prompts_to_sample(recipe: Recipe, model: Model, given: Items | None = None) -> Items | None:
    """The items whose prompts a run's samples have, those held out first; None without prompts.

    The model is told what stands for no prompt.

    Args:
        recipe: resolved.
        model: the adapter.
        given: a data set of the caller's.
    """
    if not model.prompted:
        return None
    items = given if given is not None else recipe.data.load()
    held_out = None if given is not None else recipe.data.load("validation")
    if items is not None and held_out is not None:
        items = JoinedItems(held_out, items)
    if items is not None:
        model.take_unconditional(items.unconditional)
    return items


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Key torch's global generator for the block, and restore it afterwards."""
    key = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also seed every accelerator for good.
        torch.default_generator.manual_seed(int.from_bytes(key, "little") >> 1)
        yield
