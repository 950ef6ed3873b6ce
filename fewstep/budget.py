"""How much memory a recipe needs, and how much there is."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import nn

from fewstep.activations import R1_PASSING, Kept, kept_by_exact_r1, kept_by_forward
from fewstep.build import build_storage, seeded
from fewstep.config import Recipe
from fewstep.decoding import image_bytes, weight_bytes
from fewstep.errors import UserError
from fewstep.grouping import group_of
from fewstep.memory import (
    Held,
    RankMemory,
    Spread,
    held_tensors,
    on_one_device,
    rank_memory,
    whole_bytes,
)
from fewstep.models.model import Model, empty_network
from fewstep.models.sd3 import SD3Settings
from fewstep.parallel.ranks import Ranks
from fewstep.parallel.sharding import check_shard_size
from fewstep.placement import groups_of, rollout_workers
from fewstep.pretrained import resolve_model
from fewstep.roles.role import DISCRIMINATOR, FAKE_SCORE, STUDENT, mark_trained
from fewstep.roles.storage import Storage
from fewstep.training.reduction import micro_batches

CPU = torch.device("cpu")


@final
class Estimator:
    """The memory of a recipe's ranks; its networks are built once, without memory.

    Attributes:
        recipe: resolved as far as is needed to build the networks.
        model: the adapter.
        held: trainer group -> every tensor that it keeps.
    """

    def __init__(self, recipe: Recipe, model: Model | None = None) -> None:
        """`model`: the adapter of a network of your own.

        Raises:
            UserError: where the structure of the network is not known.
        """
        self.recipe = recipe
        self.model = model or structure_of(recipe)
        self.groups = groups_of(recipe.placement, recipe.roles)
        width = recipe.runtime.torch_dtype.itemsize
        self.held: dict[str, list[Held]] = {}
        for group, roles in self.groups.items():
            storage = self._storage(roles)
            trained = recipe.optimizers.by_role(roles)
            mark_trained(storage, roles, trained)
            self.held[group] = held_tensors(storage, trained, self.model.blocks, roles, width)
            if STUDENT in roles:
                self._student = storage
            if DISCRIMINATOR in roles:
                self._classifier = storage.networks[DISCRIMINATOR]
        self._kept: dict[tuple[int, bool, torch.dtype | None], Kept | None] = {}
        self._kept_by_r1: dict[tuple[int, torch.dtype | None], int | None] = {}

    def _storage(self, roles: tuple[str, ...]) -> Storage:
        """Networks on the meta device; nothing is drawn from the caller's generator."""
        with seeded(self.recipe.seed, "roles"), torch.device("meta"):
            structure = empty_network(self.model.build_network)
            return build_storage(self.recipe, self.model, structure, roles)

    def on(self, ranks: int, recipe: Recipe | None = None) -> RankMemory:
        """The fullest of so many ranks.

        Args:
            ranks: each with a device of its own.
            recipe: one that differs in `parallel`, `runtime` and `train` only.
        """
        recipe = recipe or self.recipe
        spread, samples = spread_of(recipe, ranks), samples_of(recipe, ranks)
        kept = self.kept(samples, recipe, spread.sharded)
        recompute = recipe.runtime.activation_checkpointing
        # Groups run the same networks on as many samples: what the student's phase keeps, others
        # keep at most. Exact R1 is its classifier's alone.
        memories = [
            replace(
                rank_memory(held, spread),
                activations=self._activations(kept, group, samples, recipe),
                copies=0 if kept is None or spread.sharded else kept.copies(recompute),
            )
            for group, held in self.held.items()
        ]
        memory, workers = memories[0], self._rollout_workers(ranks)
        if len(memories) > 1 or workers:
            rollout = workers * self._student_bytes()
            memory = on_one_device(memories, rollout, recipe.placement.offload)
        # Rollout workers validate where there are any, each with an autoencoder of its own.
        decoder, images = ((workers or 1) * size for size in self._decoding)
        return replace(memory, decoder=decoder, images=images)

    @functools.cached_property
    def _decoding(self) -> tuple[int, int]:
        """Bytes of the weights that make images of samples, and of what comes and goes then."""
        if self.recipe.validation is None:
            return 0, 0
        try:
            decoder = self.model.decoder()
            return (weight_bytes(decoder), image_bytes(decoder)) if decoder is not None else (0, 0)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"model.pipeline: its vae cannot decode a sample: {reason}") from error

    def _activations(
        self, kept: Kept | None, group: str, samples: int, recipe: Recipe
    ) -> int | None:
        """Of the phase of a group that needs most; None where it cannot be counted."""
        classifies = DISCRIMINATOR in self.groups[group]
        by_r1 = self.kept_by_exact_r1(samples, recipe) if classifies else 0
        if kept is None or by_r1 is None:
            return None
        recompute = recipe.runtime.activation_checkpointing
        by_r1 = round((1 + R1_PASSING) * by_r1)
        return max(by_r1, kept.activations(recompute, *passes_of(recipe)))

    def kept(self, samples: int, recipe: Recipe, sharded: bool) -> Kept | None:
        """What the student's forward pass keeps; None where it cannot be counted."""
        dtype, compute_dtype = recipe.runtime.torch_dtype, recipe.runtime.torch_compute_dtype
        key = (samples, sharded, compute_dtype)
        if key not in self._kept:
            # A sharded network is gathered in the dtype that it computes in.
            own = compute_dtype if sharded and compute_dtype else dtype
            with self._called_in(own) as network:
                self._kept[key] = _counted(
                    lambda: kept_by_forward(self.model, network, samples, dtype, compute_dtype)
                )
        return self._kept[key]

    def kept_by_exact_r1(self, samples: int, recipe: Recipe) -> int | None:
        """What the phase of a classifier keeps for exact R1; 0 without it, None: not known."""
        classifier, runtime = recipe.classifier, recipe.runtime
        if classifier is None or not differentiates_twice(recipe):
            return 0
        dtype, compute_dtype = runtime.torch_dtype, runtime.torch_compute_dtype
        key = (samples, compute_dtype)
        if key not in self._kept_by_r1:
            head = copy.deepcopy(self._classifier).to(dtype)
            with self._called_in(dtype) as network:
                trained = [p for p in network.parameters() if p.requires_grad]
                network.requires_grad_(False)
                self._kept_by_r1[key] = _counted(
                    lambda: kept_by_exact_r1(
                        self.model, network, head, classifier.blocks, samples, dtype, compute_dtype
                    )
                )
                for parameter in trained:
                    parameter.requires_grad_()
        return self._kept_by_r1[key]

    @contextmanager
    def _called_in(self, dtype: torch.dtype) -> Iterator[nn.Module]:
        """The student's network, with weights of this dtype, and its adapter in force."""
        network = self._student.networks[self._student.network_of(STUDENT)]
        weights = {n: p.dtype for n, p in network.named_parameters()}
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
        self._student.activate(STUDENT)
        try:
            yield network
        finally:
            self._student.activate(None)
            for name, parameter in network.named_parameters():
                parameter.data = parameter.data.to(weights[name])

    def _rollout_workers(self, ranks: int) -> int:
        """How many rollout workers the fullest device has."""
        if self.recipe.launch.kind != "ray":
            return 0
        method = self.recipe.method.build()
        workers = rollout_workers(self.recipe.rollout.workers, self.groups, method, ranks)
        return -(-workers // ranks)

    def _student_bytes(self) -> int:
        """Of the network that a rollout worker has."""
        name = self._student.network_of(STUDENT)
        mine = [h for h in self.held[group_of(self.groups, STUDENT)] if h.network == name]
        return whole_bytes(mine)


T = TypeVar("T")


def _counted(count: Callable[[], T]) -> T | None:
    """What is counted; None for a network that looks at the values of its input."""
    try:
        return count()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def structure_of(recipe: Recipe) -> Model:
    """The adapter of a recipe whose weights need not be there, if it states the network.

    Raises:
        UserError: where neither recipe nor weights tell what the network is like.
    """
    settings = recipe.model
    if settings.weights is None:
        return settings.build()
    if Path(settings.weights).exists():
        return resolve_model(recipe).build()
    # Not even its name is looked up on a hub: a plan needs no connection.
    if getattr(settings, "network", None) is None:
        raise UserError(
            f"not known: {settings.weights} is not here, and the recipe does not say what its "
            f"network is like (model.network)"
        )
    if isinstance(settings, SD3Settings) and settings.pipeline is None:
        # A name on a hub stands for a whole pipeline, as far as one can tell from here.
        settings = settings.model_copy(update={"pipeline": settings.weights})
    return settings.build()


def spread_of(recipe: Recipe, ranks: int) -> Spread:
    """How a recipe's networks would be spread over so many ranks.

    A recipe for one process that is given more shares its networks by FSDP2, where that can train
    it.

    Raises:
        UserError: where they cannot be divided so.
    """
    check_shard_size(recipe.parallel, ranks)
    parallel, kind = recipe.parallel, recipe.parallel.kind
    if kind == "none" and ranks > 1 and recipe.launch.processes == 1:
        kind = "none" if differentiates_twice(recipe) else "fsdp2"
    sharded = kind in ("fsdp1", "fsdp2")
    size = (parallel.shard_size or ranks) if sharded else 1
    runtime = recipe.runtime
    width = (runtime.torch_compute_dtype or runtime.torch_dtype).itemsize
    micro, samples = recipe.train.micro_batch_size, -(-recipe.train.batch_size // ranks)
    several = micro is not None and micro < samples
    return Spread(
        kind,
        ranks,
        size,
        offload=parallel.cpu_offload,
        gathered_width=width,
        whole_gradients=sharded and several and not parallel.reduce_each_micro_batch,
    )


def differentiates_twice(recipe: Recipe) -> bool:
    """Whether a classifier is trained with exact R1, which sharded networks do not stand."""
    r1 = recipe.classifier.r1 if recipe.classifier is not None else None
    return r1 is not None and r1.kind == "exact"


def passes_of(recipe: Recipe) -> tuple[int, int]:
    """Samples of the largest call over those of a micro-batch, and micro-batches with graphs.

    Fused scoring calls once for fake score and teacher, with guidance for its two predictions; a
    classifier is trained on real and made samples together, with R1 also on moved ones. Where the
    fake score learns from them too, all have graphs, and so have those that it denoises.
    """
    at_once, method = 1, recipe.method
    if getattr(method, "score_batching", "separate") == "fused":
        at_once = 3 if getattr(method, "guidance", 1.0) != 1 else 2
    if recipe.classifier is None:
        return at_once, 1
    shown = 2 if recipe.classifier.r1 is None else 3
    if recipe.classifier.trained_with == FAKE_SCORE:
        return max(at_once, shown + 1), shown + 1
    return max(at_once, shown), 2


def samples_of(recipe: Recipe, ranks: int) -> int:
    """Samples of the largest micro-batch of any of so many ranks, whose shares differ by one."""
    batch, size = recipe.train.batch_size, recipe.train.micro_batch_size
    count = min(ranks, batch)
    every = (Ranks(rank, count, CPU, grouped=False) for rank in range(count))
    return max(len(part.rows) for one in every for part in micro_batches(batch, one, size))


def memory_there_is(device: torch.device) -> int | None:
    """Bytes that a run may use: free ones of a CUDA device, all of the main memory for the CPU.

    None: unknown, as for other accelerators.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def least_bytes(recipe: Recipe, model: Model) -> int:
    """What a rank keeps at the very least, whatever is estimated; quick to count."""
    with seeded(recipe.seed, "roles"):
        network = empty_network(model.build_network)
    numbers = sum(p.numel() for p in network.parameters())
    if recipe.lora is None:
        # Weights of all roles, and moments of those that are trained.
        numbers *= len(recipe.roles) + 2 * len(recipe.optimizers.by_role())
    size = spread_of(recipe, recipe.launch.processes).shard_size
    return numbers * recipe.runtime.torch_dtype.itemsize // size
