"""Run a recipe in this process, which may be one of several that torchrun has started."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from fewstep.checkpoint import (
    checkpoint_cycle,
    checkpoints_directory,
    complete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)
from fewstep.config import Recipe, check_fingerprint, dump_recipe, load_recipe
from fewstep.data.dataset import Dataset
from fewstep.data.items import Items
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.timesteps import few_step_grid
from fewstep.errors import UserError
from fewstep.files import saving
from fewstep.launch.hooks import (
    FINGERPRINT,
    CheckpointHook,
    OnCycle,
    RunSaves,
    build_hooks,
    run_fingerprint,
)
from fewstep.launch.lock import RunLock
from fewstep.memory_tables import check_memory
from fewstep.methods.dmd2 import sample_statistics
from fewstep.methods.method import SamplerSpec
from fewstep.models.model import Model
from fewstep.models.teacher_check import check_prediction
from fewstep.parallel.failures import Reached, another_has_failed, telling_others
from fewstep.parallel.ranks import SINGLE, Ranks, join, launched_ranks
from fewstep.roles.role import STUDENT, TEACHER_SCORE, Roles
from fewstep.run import (
    RECIPE,
    Run,
    Trained,
    build_worker,
    check_ranks,
    is_run_directory,
    load_weights,
    open_run,
    prompts_to_sample,
    resolve_recipe,
    seeded,
)
from fewstep.sampling import Samples, cpu_threads, placed, sample_role
from fewstep.training.loop import StopRequest, train_cycles
from fewstep.training.metrics import Metrics, logger, open_metrics
from fewstep.training.worker import Worker
from fewstep.validation import Judge, ValidationSettings, build_judge, validation_samples

Resume = bool | Literal["auto"]
TIMELINE = "timeline.json"


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
    judge = open_judge(recipe, model, dataset, items) if ranks.first else None
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


def look_at_directory(directory: Path, resuming: Resume, lock: RunLock) -> bool:
    """Whether the run is gone on with; rank 0 alone looks, others may see an older listing.

    Raises:
        UserError: unless it can be started, or gone on with.
    """
    with saving(directory):
        lock.check()
    resume = is_resumed(directory, resuming)
    check_directory(directory, resume)
    if resume:
        with saving(directory):
            lock.acquire()
    return resume


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
    recipe: Recipe, model: Model, dataset: Items | None, items: Items | None
) -> Judge | None:
    """What judges a run's samples, if it is validated.

    Args:
        recipe: resolved.
        model: the adapter.
        dataset: of the run.
        items: whose prompts the samples have, where they have any: they are held against the
            images of the same prompts.

    Raises:
        UserError: where it cannot be had.
    """
    settings, real = recipe.validation, items if items is not None else dataset
    if settings is None or real is None:
        return None
    return build_judge(settings, real, model, recipe.data.name)


def open_directory(
    recipe: Recipe, start: int, resume: bool, lock: RunLock, ranks: Ranks = SINGLE
) -> Metrics:
    """Make the run directory and write the recipe into it; rank 0 alone does that.

    Args:
        recipe: resolved.
        start: the cycle that the run goes on from.
        resume: whether it does.
        lock: of the directory.
        ranks: that share the run.
    """
    if not ranks.first:
        return Metrics([])
    directory = Path(recipe.run_dir)
    with saving(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        if not resume:
            check_directory(directory, resume)  # another may have been quicker
            remove_unsaved(directory)
        metrics = open_metrics(recipe.logging, directory, start)
    try:
        with saving(directory):
            write_recipe(directory, recipe)
    except BaseException:
        metrics.close()
        raise
    return metrics


def check_device(device: str) -> None:
    """Raise UserError for a device that is not there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"runtime.device: {device!r}: {first_line}") from error


def is_resumed(directory: Path, resume: Resume) -> bool:
    """Whether a run is gone on with; raises UserError for what says neither yes nor no."""
    if resume not in (True, False, "auto"):
        raise UserError(f"resume: {resume!r} is given; it should be True, False or 'auto'")
    return bool(complete_checkpoints(directory)) if resume == "auto" else bool(resume)


def check_directory(directory: Path, resume: bool) -> None:
    """Raise UserError unless a run can be started, or resumed, in the directory."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"run_dir: {directory} is a file; name a directory")
    cycles = [checkpoint_cycle(c) for c in complete_checkpoints(directory)]
    if resume and not cycles:
        raise UserError(
            f"run_dir: {directory} holds no complete checkpoint to go on from; start it without "
            f"--resume"
        )
    if cycles and not resume:
        raise UserError(
            f"run_dir: {directory} holds a run already (up to cycle {cycles[-1]}); go on with "
            f"--resume, or choose another directory with --run-dir"
        )
    parent = next(p for p in [directory, *directory.parents] if p.exists())
    if not parent.is_dir():
        raise UserError(f"run_dir: {directory} cannot be made: {parent} is a file")
    if not os.access(parent, os.W_OK):
        raise UserError(f"run_dir: {directory} cannot be written (no permission for {parent})")


def remove_unsaved(directory: Path) -> None:
    """Clear away what a run that ended before its first checkpoint has left: its records."""
    if is_run_directory(directory):
        logger.warning(
            "%s holds a run already, which ended before its first checkpoint: starting it anew",
            directory,
        )
    for file in (
        directory / RECIPE,
        directory / "metrics.jsonl",
        directory / TIMELINE,
        checkpoints_directory(directory) / "best.json",
    ):
        file.unlink(missing_ok=True)


def resumed_recipe(directory: Path) -> Recipe | None:
    """The recipe that a run directory holds."""
    return load_recipe(directory / RECIPE) if is_run_directory(directory) else None


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Turn torch's refusals (impossible sizes, no memory) into a UserError that begins so."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"{what}: {lines[0]}") from error


def check_network(roles: Roles, seed: int) -> None:
    """Call a role's network once; raises UserError where it does not give what it is given."""
    model = roles.model
    denoisers = [name for name in roles if name not in roles.storage.heads]
    role = STUDENT if STUDENT in roles else denoisers[0]
    x = torch.zeros(2, *model.sample_shape, device=roles.device, dtype=roles.dtype)
    condition = {key: value.to(roles.device) for key, value in model.example_condition(2).items()}
    # A network of the caller's may draw from the global generator.
    with (
        reporting("model: the network cannot be called"),
        seeded(seed, "trial"),
        torch.no_grad(),
        roles.use(role) as denoiser,
    ):
        output = model.forward(denoiser.network, x, x.new_full((2,), 0.5), condition)
    if output.shape != x.shape:
        raise UserError(
            f"model: the network returns shape {tuple(output.shape)}, its input has "
            f"{tuple(x.shape)}"
        )


def check_teacher(roles: Roles, seed: int, dataset: Items | None) -> None:
    """Let the teacher denoise some real samples, where there are any.

    Raises:
        UserError: where what it says makes much more sense as another kind of prediction.
    """
    if TEACHER_SCORE not in roles or dataset is None or not dataset.has_samples:
        return
    model, numbers = roles.model, torch.arange(min(16, len(dataset)))
    x0 = dataset.x0(numbers)
    x0 = (model.encode(x0) if isinstance(dataset, Dataset) else x0).to(roles.device, roles.dtype)
    condition = placed(dataset.condition(numbers), roles.device, roles.dtype)
    if condition.keys() != model.example_condition(1).keys() or x0.shape[1:] != model.sample_shape:
        return  # data of another kind, which samples are merely compared with
    ids = numbers.to(roles.device)
    eps = Draw(seed, 0, "teacher").normal("eps", ids, x0.shape[1:], roles.dtype)
    with roles.use(TEACHER_SCORE) as teacher:
        check_prediction(model, teacher.network, x0, eps, condition)


def restore(directory: Path, recipe: Recipe, worker: Worker) -> int:
    """Load the latest checkpoint into a worker; the cycle it was saved after.

    Raises:
        UserError: where it is damaged, or the recipe has changed in a way that matters.
    """
    checkpoint = worker.ranks.tell(lambda: latest_checkpoint(directory))
    saved = read_fingerprint(checkpoint)
    check_fingerprint(saved, run_fingerprint(recipe, worker), checkpoint)
    state = load_checkpoint(checkpoint, worker.empty_state, worker.ranks)
    worker.load_state_dict(state)
    return int(state["cycle"])


def read_fingerprint(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint's run was, before all of the checkpoint is read and checked.

    Raises:
        UserError: where it is damaged.
    """
    file = checkpoint / FINGERPRINT
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        verify_checkpoint(checkpoint)
        raise UserError(f"{file} cannot be read: {error}") from error
    return found


def write_recipe(directory: Path, recipe: Recipe) -> None:
    """Write the resolved recipe into the run directory, atomically."""
    temporary = directory / f".{RECIPE}.tmp"
    temporary.write_text(dump_recipe(recipe))
    os.replace(temporary, directory / RECIPE)


def teacher_statistics(run: Run, steps: int = 16) -> dict[str, float] | None:
    """Moments of the teacher's own samples, which the student's are held against.

    None where there is no teacher, or `logging.teacher_samples` is 0.
    """
    count = run.recipe.logging.teacher_samples
    if TEACHER_SCORE not in run.roles or not count:
        return None
    guidance = getattr(run.recipe.method, "guidance", 1.0)
    # From where the student starts: an eps network says nothing of a sample that is all noise.
    first = run.method.sampler().sigmas[0]
    spec = SamplerSpec(tuple(first * s for s in few_step_grid(steps)), "euler", guidance)
    made = sample_role(
        run.roles,
        TEACHER_SCORE,
        spec,
        run.conditions(count),
        batch_size=run.recipe.train.micro_batch_size or run.recipe.train.batch_size,
        ranks=run.worker.ranks,
        decode=False,
    )
    moments = {key: float(value) for key, value in sample_statistics(made.images).items()}
    square = moments.pop("sample_mean_square")
    return moments | {"sample_std": (square - moments["sample_mean"] ** 2) ** 0.5}
