"""Run a recipe on a Ray cluster: the process that the user has started."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import ray

from fewstep.build import check_ranks
from fewstep.checkpoint import check_all_read, checkpoint_cycle, latest_checkpoint
from fewstep.config import Recipe, check_fingerprint, fingerprint
from fewstep.data.conditions import conditions_in_turn
from fewstep.data.items import Items
from fewstep.errors import UserError
from fewstep.launch.directory import (
    TIMELINE,
    Resume,
    look_at_directory,
    open_directory,
    read_fingerprint,
    resumed_recipe,
)
from fewstep.launch.hooks import CheckpointHook, OnCycle, build_hooks
from fewstep.launch.local import load_data, open_judge
from fewstep.launch.lock import RunLock
from fewstep.launch.ray.cluster import Cluster
from fewstep.launch.ray.executor import GroupExecutor
from fewstep.launch.ray.group import TrainerGroup
from fewstep.launch.ray.pool import RolloutPool
from fewstep.launch.ray.saving import GroupSaves, unpack_ahead
from fewstep.launch.ray.trainer import Report
from fewstep.launch.ray.underway import Underway
from fewstep.models.model import Model
from fewstep.parallel.ranks import CPU, Ranks
from fewstep.pipeline_engine import check_engine
from fewstep.placement import Placement, groups_of, place, rollout_workers
from fewstep.pretrained import resolve_recipe
from fewstep.roles.role import STUDENT
from fewstep.run import Trained, prompts_to_sample
from fewstep.sampling import cpu_threads
from fewstep.training.loop import StopRequest, train_cycles
from fewstep.training.metrics import Metrics
from fewstep.training.phase import PhaseResult
from fewstep.training.timeline import Timeline
from fewstep.validation import Judge
from fewstep.weights import Confirmation


def train_on_ray(
    recipe: Recipe,
    *,
    model: Model | None = None,
    data: Items | None = None,
    resume: Resume = False,
    on_cycle: OnCycle | None = None,
    stop: StopRequest | None = None,
) -> Trained:
    """Train a recipe on a Ray cluster; arguments and errors are those of `launch.local.train`."""
    directory = Path(recipe.run_dir)
    with RunLock(directory) as lock, cpu_threads(recipe.runtime.threads):
        resuming = look_at_directory(directory, resume, lock)
        recipe = resolve_recipe(recipe, resumed_recipe(directory) if resuming else None)
        adapter = model or recipe.model.build()
        recipe.method.build().check(adapter)
        check_engine(recipe, adapter)
        check_ranks(recipe, Ranks(0, recipe.launch.processes, CPU, grouped=True))
        if data is None:
            recipe.data.check(adapter.encoding())
        dataset = load_data(recipe, data)
        items = prompts_to_sample(recipe, adapter, data)
        judge = open_judge(recipe, adapter, dataset, items)
        checkpoint = latest_checkpoint(directory) if resuming else None
        if checkpoint is not None:
            check_recipe(recipe, checkpoint)
        if checkpoint is not None and checkpoint_cycle(checkpoint) >= recipe.train.cycles:
            return Trained(directory, recipe, checkpoint_cycle(checkpoint), 0)
        placement, timeline = place_recipe(recipe), Timeline(directory / TIMELINE)
        underway = Underway(recipe.launch.timeout_seconds, timeline.extend)
        with Cluster(recipe.launch, placement, recipe.placement.timeout_seconds) as cluster:
            caller = ShippedFromCaller.of(model, data)
            groups = start_groups(cluster, placement, recipe, caller, checkpoint, underway)
            report = agree(groups, checkpoint, recipe)
            pool = start_pool(cluster, placement, recipe, caller, checkpoint, underway)
            if pool is not None:
                check_base(groups[placement.group_of(STUDENT)].base(), pool.bases())
            ahead = unpack_ahead(checkpoint, recipe.launch.processes) if checkpoint else []
            executor = GroupExecutor(
                recipe,
                groups,
                pool,
                timeline,
                report.student_updates or 0,
                partial(conditions_in_turn, adapter.classes, items),
                ahead,
            )
            metrics = open_directory(recipe, report.cycle, resuming, lock)
            try:
                return run_cycles(
                    recipe, executor, report, judge, metrics, on_cycle, stop or StopRequest()
                )
            finally:
                metrics.close()


def run_cycles(
    recipe: Recipe,
    executor: GroupExecutor,
    report: Report,
    judge: Judge | None,
    metrics: Metrics,
    on_cycle: OnCycle | None,
    stop: StopRequest,
) -> Trained:
    """The training loop, with its hooks, over groups that are set up."""
    start = report.cycle
    # Not alone: where ranks have failed, `GroupSaves.close` publishes what they can still finish.
    saver = CheckpointHook(
        recipe.checkpoint.every, GroupSaves(recipe, executor, report.fingerprint), alone=False
    )
    hooks = build_hooks(
        recipe, start, report.reference, executor.sample, judge, metrics, on_cycle, saver
    )
    hooks.append(TimelineHook(executor.timeline, metrics, recipe))
    cycles = range(start + 1, recipe.train.cycles + 1)
    method = recipe.method.build()
    k, followers = method.fake_updates_per_student, method.followers
    with stop.on_interrupt(), saver:
        done = train_cycles(executor, cycles, k, recipe.cycle, hooks, stop, followers=followers)
        if done > start or start == 0:
            saver.save(done)
    executor.timeline.write()
    executor.leave()
    return Trained(Path(recipe.run_dir), recipe, done, done - start)


def check_recipe(recipe: Recipe, checkpoint: Path) -> None:
    """Raise UserError where a recipe has changed since a checkpoint, before anything is started.

    What the data is, the processes find out.
    """
    saved = {k: v for k, v in read_fingerprint(checkpoint).items() if k != "data.sha256"}
    check_fingerprint(saved, fingerprint(recipe), checkpoint)


def place_recipe(recipe: Recipe) -> Placement:
    """The places of a run's processes, as a recipe says."""
    bundles = recipe.launch.processes
    groups = groups_of(recipe.placement, recipe.roles)
    workers = rollout_workers(recipe.rollout.workers, groups, recipe.method.build(), bundles)
    return place(recipe.placement, recipe.roles, bundles, workers, recipe.runtime.device)


def put(name: str, value: object) -> Any:
    """Put something of the caller's where all processes can get it; its reference, or None.

    Raises:
        UserError: where it cannot be sent to another process.
    """
    if value is None:
        return None
    try:
        return ray.put(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{name}: {type(value).__name__} cannot be sent to the processes of a run on Ray: "
            f"{reason}; leave open files, locks, generators and the like out of it"
        ) from error


@final
@dataclass(frozen=True)
class ShippedFromCaller:
    """References of what the caller has passed in from Python, or None."""

    model: Any
    data: Any

    @classmethod
    def of(cls, model: Model | None, data: Items | None) -> ShippedFromCaller:
        """Put it where all processes can get it, once."""
        return cls(put("model", model), put("data", data))


def start_groups(
    cluster: Cluster,
    placement: Placement,
    recipe: Recipe,
    caller: ShippedFromCaller,
    checkpoint: Path | None,
    underway: Underway,
) -> dict[str, TrainerGroup]:
    """Start the groups one after another, each giving up the accelerators for the next."""
    groups = {}
    for name, roles in placement.groups.items():
        seats = placement.seats_of(name)
        group = TrainerGroup(cluster, name, roles, seats, recipe, underway)
        group.set_up(caller.model, caller.data, checkpoint)
        if recipe.placement.offload:
            group.sleep(cycle=0)
        groups[name] = group
    return groups


def start_pool(
    cluster: Cluster,
    placement: Placement,
    recipe: Recipe,
    caller: ShippedFromCaller,
    checkpoint: Path | None,
    underway: Underway,
) -> RolloutPool | None:
    """Start the rollout workers, if there are any."""
    seats = [seat for seat in placement.seats if seat.kind == "rollout"]
    if not seats:
        return None
    return RolloutPool(cluster, seats, recipe, caller.model, caller.data, checkpoint, underway)


def agree(groups: Mapping[str, TrainerGroup], checkpoint: Path | None, recipe: Recipe) -> Report:
    """What all groups have found alike, with what only some of them know.

    Raises:
        UserError: with a table, where they stand in different places; naming the keys, where the
            recipe has changed since the checkpoint; or naming what no group has read of it.
    """
    reports = {name: group.report for name, group in groups.items()}
    check_agreement(
        {
            f"{name}/{rank}": report
            for name, group in groups.items()
            for rank, report in enumerate(group.reports)
        }
    )
    found = next(iter(reports.values()))
    if checkpoint is not None:
        check_fingerprint(read_fingerprint(checkpoint), found.fingerprint, checkpoint)
        check_all_read({name: report.unread for name, report in reports.items()})
    updates = [r.student_updates for r in reports.values() if r.student_updates is not None]
    references = [r.reference for r in reports.values() if r.reference is not None]
    return replace(
        found, student_updates=updates[0], reference=references[0] if references else None
    )


def check_base(trained: Confirmation | None, held: Mapping[str, Confirmation | None]) -> None:
    """Raise UserError unless rollout workers rest on the same frozen base as the student.

    Args:
        trained: what the student rests on; None: nothing, it is a network of its own.
        held: the same of each worker.
    """
    if wrong := [worker for worker, base in held.items() if base != trained]:
        raise UserError(
            f"{', '.join(wrong)} has another base network than the student is trained on; "
            f"model.weights must be the same files on all nodes"
        )


def check_agreement(reports: Mapping[str, Report]) -> None:
    """Raise UserError with a table unless all stand at the same place of the same run.

    Args:
        reports: by process.
    """
    rows = {
        name: (r.cycle, r.data_position, r.read[:12], digest(r.fingerprint))
        for name, r in reports.items()
    }
    if len(set(rows.values())) <= 1:
        return
    width = max(len("process"), *map(len, rows))
    lines = [f"{'process':<{width}}  cycle  samples taken  checkpoint    recipe and data"]
    lines += [
        f"{name:<{width}}  {cycle:>5}  {position:>13}  {read or '-':<12}  {mark}"
        for name, (cycle, position, read, mark) in rows.items()
    ]
    raise UserError(
        "the trainer groups do not stand at the same place of the same run, so it cannot go on:\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nAll nodes must see the same run_dir; start it again once they do"
    )


def digest(fingerprint: Mapping[str, Any]) -> str:
    """A short mark that tells fingerprints apart."""
    content = json.dumps(fingerprint, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:12]


@final
class TimelineHook:
    """Writes where each cycle's time went: to the metrics, and as a trace."""

    def __init__(self, timeline: Timeline, metrics: Metrics, recipe: Recipe) -> None:
        """Prepare to write.

        Args:
            timeline: knows what was done when.
            metrics: get the series "timing".
            recipe: says how often.
        """
        self._timeline, self._metrics = timeline, metrics
        self._every, self._last = recipe.logging.every, recipe.train.cycles

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        if cycle == self._last or cycle % self._every == 0:
            self._metrics.write("timing", cycle, cycle, self._timeline.cycle_values(cycle))
            self._timeline.write()
