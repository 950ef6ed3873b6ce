"""Run a recipe in this process, which may be one of several that torchrun has started."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fewstep.build import build_worker, check_ranks
from fewstep.config import Recipe
from fewstep.data.items import Items
from fewstep.errors import UserError
from fewstep.launch.directory import (
    Resume,
    look_at_directory,
    open_directory,
    restore,
    resumed_recipe,
)
from fewstep.launch.hooks import CheckpointHook, OnCycle, RunSaves, build_hooks
from fewstep.launch.lock import RunLock
from fewstep.launch.trials import (
    check_device,
    check_network,
    check_teacher,
    reporting,
    teacher_statistics,
)
from fewstep.memory_tables import check_memory
from fewstep.models.model import Model
from fewstep.parallel.failures import Reached, another_has_failed, telling_others
from fewstep.parallel.ranks import CPU, Ranks, join, launched_ranks
from fewstep.pretrained import load_weights, resolve_recipe
from fewstep.run import Run, Trained, open_run, prompts_to_sample
from fewstep.sampling import Samples, cpu_threads
from fewstep.training.loop import StopRequest, train_cycles
from fewstep.training.metrics import logger
from fewstep.validation import Judge, ValidationSettings, build_judge, validation_samples


def train(
    recipe: Recipe,
    *,
    model: Model | None = None,
    data: Items | None = None,
    resume: Resume = False,
    on_cycle: OnCycle | None = None,
    stop: StopRequest | None = None,
) -> Run:
    """Train a recipe to its last cycle, or until a stop is requested.

    Args:
        recipe: what to do; `run_dir` says where.
        model: the adapter of a network of your own (`model: {family: module}`).
        data: a data set of your own (`data: {name: custom}`).
        resume: go on from the latest checkpoint of `run_dir`; "auto": if there is one.
        on_cycle: called after each cycle with its number and its phases' results.
        stop: set its `requested` to stop after the current cycle; everything is saved.

    Returns:
        The run, its networks in memory; `run.complete` says whether it got to the end.

    Raises:
        UserError: for anything that the caller can put right, before any cycle is run.
        TrainingError: where the run cannot go on.
    """
    if recipe.launch.kind == "ray":
        driver = ray_driver()
        trained = driver(
            recipe, model=model, data=data, resume=resume, on_cycle=on_cycle, stop=stop
        )
        return replace(open_run(trained.directory, model=model), cycles_run=trained.cycles_run)
    stop = stop or StopRequest()
    reached = Reached()
    with (
        telling_others(launched_ranks() or 1, recipe.launch.timeout_seconds, reached),
        cpu_threads(recipe.runtime.threads),
        RunLock(Path(recipe.run_dir)) as lock,
    ):
        check_device(recipe.runtime.device)
        return train_in_process(recipe, model, data, resume, on_cycle, stop, reached, lock)


def ray_driver() -> Callable[..., Trained]:
    """`launch.ray.driver.train_on_ray`.

    Raises:
        UserError: where Ray is not installed, or torchrun has started this process.
    """
    if launched_ranks() is not None:
        raise UserError(
            "launch.kind: 'ray' is given, but torchrun has started this process; start the run "
            "with `fewstep train` alone, which lets Ray start the processes"
        )
    try:
        from fewstep.launch.ray.driver import train_on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("launch.kind: 'ray' needs Ray: pip install 'fewstep[ray]'") from error
    return train_on_ray


def train_in_process(
    recipe: Recipe,
    model: Model | None,
    data: Items | None,
    resuming: Resume,
    on_cycle: OnCycle | None,
    stop: StopRequest,
    reached: Reached,
    lock: RunLock,
) -> Run:
    """The body of `train`, with the threads set."""
    ranks = join_ranks(recipe)
    directory = Path(recipe.run_dir)
    resume = ranks.tell(lambda: look_at_directory(directory, resuming, lock))
    recipe = resolve_recipe(recipe, resumed_recipe(directory) if resume else None)
    model = model or recipe.model.build()
    recipe.method.build().check(model)
    check_ranks(recipe, ranks)
    check_memory(recipe, model, ranks)
    if data is None and ranks.first:
        recipe.data.check(model.encoding())
    dataset = load_data(recipe, data)
    with reporting("model: the network cannot be built"):
        teacher = None if resume else load_weights(recipe, model, ranks)
        worker = build_worker(recipe, model, dataset, teacher, ranks)
    check_network(worker.roles, recipe.seed)
    if not resume:  # the weights of a run that is gone on with are not there yet
        check_teacher(worker.roles, recipe.seed, dataset)
    start = restore(directory, recipe, worker) if resume else 0
    items = prompts_to_sample(recipe, model, data)
    run = Run(directory, recipe, worker, start, items=items)
    if run.complete:
        return run
    # All that may fail comes before the recipe is written, which makes it a run directory.
    reference = teacher_statistics(run)
    judge = open_judge(recipe, model, dataset, items, ranks.device) if ranks.first else None
    ranks.barrier()  # every rank has looked at the directory as it was
    metrics = open_directory(recipe, start, resume, lock, ranks)
    try:
        saver = CheckpointHook(recipe.checkpoint.every, RunSaves(run), alone=ranks.size == 1)

        def sample(settings: ValidationSettings) -> Samples | None:
            return validation_samples(settings, run.roles, run.method.sampler(), items, ranks)

        hooks = build_hooks(
            recipe, start, reference, sample, judge, metrics, on_cycle, saver, ranks
        )
        cycles = range(start + 1, recipe.train.cycles + 1)
        k, followers = worker.method.fake_updates_per_student, worker.method.followers
        # Saving ends last, with what is still being written in the background.
        with stop.on_interrupt(another_has_failed if ranks.size > 1 else None), saver:
            hooks.insert(0, reached)
            done = train_cycles(worker, cycles, k, recipe.cycle, hooks, stop, ranks.any, followers)
            if done > start or not resume:
                saver.save(done)
        if done < recipe.train.cycles:
            stop.signal = agreed_signal(ranks, stop.signal)
    finally:
        metrics.close()
    return Run(directory, recipe, worker, done, cycles_run=done - start, items=items)


def join_ranks(recipe: Recipe) -> Ranks:
    """Meet the other processes of the run; only the first one's log is worth reading."""
    grouped = recipe.parallel.kind != "none"
    ranks = join(torch.device(recipe.runtime.device), recipe.launch.timeout_seconds, grouped)
    if not ranks.first:
        logger.setLevel(logging.ERROR)
    return ranks


def agreed_signal(ranks: Ranks, own: signal.Signals | None) -> signal.Signals | None:
    """What has stopped the run: a signal may have reached some of the ranks only."""
    number = int(ranks.gather(torch.tensor([own or 0])).max())
    return signal.Signals(number) if number else None


def load_data(recipe: Recipe, given: Items | None) -> Items | None:
    """The data set of a run, `given` by the caller or loaded as the recipe says.

    Raises:
        UserError: where one is needed and there is none.
    """
    dataset = given if given is not None else recipe.data.load()
    if dataset is None and (recipe.data.name == "custom" or recipe.validation is not None):
        raise UserError("data: the recipe needs a data set; pass it as train(recipe, data=...)")
    return dataset


def open_judge(
    recipe: Recipe,
    model: Model,
    dataset: Items | None,
    items: Items | None,
    device: torch.device = CPU,
) -> Judge | None:
    """What judges a run's samples, if it is validated.

    Args:
        recipe: resolved.
        model: the adapter.
        dataset: of the run.
        items: whose prompts the samples have, where they have any: they are held against the
            images of the same prompts.
        device: to make images of latents on.

    Raises:
        UserError: where it cannot be had.
    """
    settings, real = recipe.validation, items if items is not None else dataset
    if settings is None or real is None:
        return None
    return build_judge(settings, real, model, recipe.data.name, device)
