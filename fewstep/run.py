"""A run: its recipe, networks and checkpoints; made anew or opened from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fewstep.build import build_worker
from fewstep.checkpoint import load_checkpoint
from fewstep.config import Recipe, load_recipe
from fewstep.data.conditions import Conditions, conditions_in_turn, label_conditions
from fewstep.data.items import Items, JoinedItems
from fewstep.errors import UserError
from fewstep.methods.method import Method, SamplerSpec
from fewstep.models.model import Model
from fewstep.parallel.settings import LaunchSettings, ParallelSettings
from fewstep.placement import PlacementSettings
from fewstep.pretrained import RECIPE, Which, check_run_directory, find_checkpoint
from fewstep.roles.role import Roles
from fewstep.rollout import RolloutSettings
from fewstep.sampling import Samples, cpu_threads, sample_role
from fewstep.training.metrics import logger
from fewstep.training.worker import Worker
from fewstep.validation import sampled_role


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
            role: whose network; a score's is sampled in many steps, the teacher's with guidance.
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
        role = role or self.result_role
        sampler = spec or self.method.sampler(steps, role)
        with cpu_threads(self.recipe.runtime.threads):
            return sample_role(
                self.roles,
                role,
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


def open_run(
    directory: Path | str,
    which: Which | None = "latest",
    model: Model | None = None,
    roles: Sequence[str] | None = None,
) -> Run:
    """Open a run directory at its latest or best checkpoint.

    Args:
        directory: of the run.
        which: "latest" or "best" (by validation); None: the best if it was validated.
        model: the adapter, for a network that was passed in from Python.
        roles: those to open, as far as the run has them, without their optimizers; None: all, with
            all that it needs to go on.

    Raises:
        UserError: where there is no run, no such checkpoint, or it is damaged.
    """
    directory = Path(directory)
    check_run_directory(directory)
    recipe = load_recipe(directory / RECIPE)
    checkpoint = find_checkpoint(directory, which)
    model = model or recipe.model.build()
    items = prompts_that_are_left(recipe, model)
    some = roles is not None
    names = [name for name in recipe.roles if roles is None or name in roles]
    # However it was trained: it is opened by one process.
    alone = for_one_process(recipe)
    worker = build_worker(alone, model, None, teacher=None, roles=names, trained=not some)
    state = load_checkpoint(checkpoint, partial(worker.empty_state, partial=some), partial=some)
    worker.load_state_dict(state, partial=some)
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


def prompts_that_are_left(recipe: Recipe, model: Model) -> Items | None:
    """`prompts_to_sample` of a run that is opened; None, with a warning, where they are gone."""
    try:
        return prompts_to_sample(recipe, model)
    except UserError as error:  # prompts of one's own can be sampled all the same
        logger.warning("%s", error)
        return None


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
