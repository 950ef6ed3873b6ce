"""What `fewstep plan` shows of a recipe: who sits where, and who does what in a cycle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from torch import nn

from fewstep.config import Recipe
from fewstep.grouping import DRIVER, ROLLOUT, Groups, group_of, scoring_group
from fewstep.methods.method import Method
from fewstep.models.module import ModuleModel
from fewstep.placement import groups_of, place, placement_table, rollout_workers
from fewstep.roles.role import STUDENT
from fewstep.training.cycle import plan_cycle
from fewstep.training.phase import PhaseRequest


@final
@dataclass(frozen=True)
class Step:
    """One thing that is done in a cycle.

    Attributes:
        name: what it is: a phase's name, or e.g. "rollout fake_score/0", "score student", "push",
            "wake critic".
        group: who does it: a trainer group, "rollout" or "driver".
        role: the role trained; None where none is.
        takes: what it is given, and by whom.
        gives: what it hands over, and to whom.
    """

    name: str
    group: str
    role: str | None = None
    takes: str = ""
    gives: str = ""


def cycle_steps(recipe: Recipe, cycle: int) -> list[Step]:
    """All that is done in one cycle, in order.

    Args:
        recipe: of the run.
        cycle: 1, 2, ...
    """
    crew, every = _crew(recipe), recipe.checkpoint.every
    steps = _training(crew, cycle)
    if crew.validates(cycle):
        steps.append(_validate(crew))
    if cycle % every == 0 or cycle == recipe.train.cycles:
        steps.append(_save(crew))
    return steps


def plan_recipe(recipe: Recipe) -> RenderableType:
    """A recipe's processes and the steps of its cycles; nothing is started, no weights are read."""
    crew, warmup = _crew(recipe), recipe.cycle.warmup_cycles
    parts: list[RenderableType] = []
    if recipe.launch.kind == "ray":
        bundles, device = recipe.launch.processes, recipe.runtime.device
        parts += [
            placement_table(place(recipe.placement, recipe.roles, bundles, crew.workers, device)),
            "",
        ]
    # Not the first of its kind, which makes up for what no cycle before has done.
    usual = min(warmup + 2, recipe.train.cycles)
    steps = _training(crew, usual)
    steps += [_save(crew)] if recipe.validation is None else [_validate(crew), _save(crew)]
    parts += [_steps_table(f"A cycle, of {recipe.train.cycles}", steps), ""]
    if warmup:
        names = " -> ".join(_short([step.name for step in _training(crew, warmup)]))
        which = f"Cycles 1 to {warmup} train" if warmup > 1 else "Cycle 1 trains"
        spared = " and ".join(role.replace("_", " ") for role in crew.method.followers)
        parts.append(f"{which} the {spared} only: {names}.")
    return Group(*parts, *_notes(crew))


@final
@dataclass(frozen=True)
class _Crew:
    """A recipe, and who is there to run it."""

    recipe: Recipe
    method: Method
    groups: Groups
    workers: int

    def home(self, role: str) -> str:
        """The group in which a role lives."""
        return group_of(self.groups, role)

    def scoring(self, role: str) -> str | None:
        """The other group that scores the samples of a role."""
        return scoring_group(self.groups, self.method, role)

    def phases(self, cycle: int) -> list[PhaseRequest]:
        """Those of a cycle, in order."""
        k, followers = self.method.fake_updates_per_student, self.method.followers
        return plan_cycle(cycle, k, self.recipe.cycle, followers)

    def fed(self, cycle: int) -> list[PhaseRequest]:
        """The phases of a cycle that use samples of the rollout workers."""
        phases = self.phases(cycle) if self.workers else []
        return [p for p in phases if p.role != STUDENT or self.scoring(p.role)]

    def ahead(self, phase: PhaseRequest) -> bool:
        """Whether a phase's samples are made while the cycle before trains."""
        stale = self.recipe.rollout.schedule == "async" and phase.role in self.method.stale_samples
        return stale and phase.cycle > 1

    def validates(self, cycle: int) -> bool:
        """Whether the student is validated after a cycle; workers wait for its first update."""
        settings, last = self.recipe.validation, cycle == self.recipe.train.cycles
        if settings is None or (self.workers and cycle <= self.recipe.cycle.warmup_cycles):
            return False
        return last or cycle % settings.every == 0

    def awake(self, cycle: int) -> tuple[str, ...]:
        """With offload: who is on the accelerators when a cycle begins, beside async workers."""
        if cycle == 1:
            return (ROLLOUT,)
        last = self.phases(cycle - 1)[-1].role
        # Rollout workers have just taken the student's weights.
        return (self.home(last), *((ROLLOUT,) if last == STUDENT else ()))

    def tensors(self, role: str) -> str:
        """Names of what a phase is given; they do not depend on the network."""
        network = ModuleModel(nn.Identity, (1,))
        return ", ".join(self.method.external_tensors(role, network, torch.float32))


def _crew(recipe: Recipe) -> _Crew:
    method, groups = recipe.method.build(), groups_of(recipe.placement, recipe.roles)
    workers = 0
    if recipe.launch.kind == "ray":
        workers = rollout_workers(recipe.rollout.workers, groups, method, recipe.launch.processes)
    return _Crew(recipe, method, groups, workers)


def _training(crew: _Crew, cycle: int) -> list[Step]:
    """The phases of a cycle, and what is done for them before and after."""
    steps: list[Step] = []
    phases, fed, rollouts = crew.phases(cycle), crew.fed(cycle), _rollouts(crew, cycle)
    push = Step("push", crew.home(STUDENT), gives=f"the student's weights to {ROLLOUT}")
    if cycle == 1 and phases[0] in fed:
        rollouts.insert(0, push)  # the workers have not had any
    for phase in phases:
        scoring = crew.scoring(phase.role)
        if phase in fed[:1]:
            steps += rollouts
        if scoring is not None:
            given = f"{crew.tensors(phase.role)} for {phase.name}"
            steps.append(Step(f"score {phase.name}", scoring, None, f"x0 from {ROLLOUT}", given))
        steps.append(_phase(crew, phase, phases))
        if phase.role == STUDENT and crew.workers:
            steps.append(push)
    return _take_turns(crew, steps, crew.awake(cycle)) if crew.recipe.placement.offload else steps


def _take_turns(crew: _Crew, steps: Sequence[Step], awake: Sequence[str]) -> list[Step]:
    """With offload: who leaves the accelerators, and comes back to them, between the steps.

    One trainer group is awake at a time, and without `async` no rollout worker while it trains.
    Weights are pushed from one that is awake to workers that are.
    """
    found, present = [], list(awake)
    sync = crew.recipe.rollout.schedule == "sync"
    for step in steps:
        leaving = [] if step.group == ROLLOUT else [g for g in present if g != step.group]
        coming = [step.group]
        if step.name == "push":
            leaving, coming = [g for g in leaving if g != ROLLOUT], [step.group, ROLLOUT]
        if not sync:
            leaving, coming = ([g for g in groups if g != ROLLOUT] for groups in (leaving, coming))
        coming = [group for group in coming if group not in present]
        found += [Step(f"sleep {group}", group) for group in leaving]
        found += [Step(f"wake {group}", group) for group in coming]
        found.append(step)
        present = [group for group in present if group not in leaving] + coming
    return found


def _rollouts(crew: _Crew, cycle: int) -> list[Step]:
    """What the rollout workers make: for this cycle, and meanwhile for the next."""
    now = [phase for phase in crew.fed(cycle) if not crew.ahead(phase)]
    later = [phase for phase in crew.fed(cycle + 1) if crew.ahead(phase)]
    steps = []
    for phases, which in ((now, ""), (later, "next ")):
        # Phases that share their samples follow each other.
        for rollout, users in groupby(phases, lambda phase: phase.rollout):
            names = [f"score {p.name}" if p.role == STUDENT else p.name for p in users]
            given = f"x0 for {which}{', '.join(_short(names))}"
            steps.append(Step(f"rollout {which}{rollout}", ROLLOUT, gives=given))
    return steps


def _phase(crew: _Crew, phase: PhaseRequest, phases: Sequence[PhaseRequest]) -> Step:
    """A phase, and what it takes from others of the cycle."""
    scoring, sharing = crew.scoring(phase.role), [p for p in phases if p.rollout == phase.rollout]
    first = sharing[0]
    learns, takes, gives = phase.role != STUDENT, "its own samples", ""
    if crew.method.needs_data and not crew.method.followers:
        takes = "data"
    elif scoring is not None:
        takes = f"{crew.tensors(phase.role)} from {scoring}"
    elif learns and crew.workers:
        older = "older " if crew.ahead(phase) else ""
        takes = f"{older}{crew.tensors(phase.role)} from {ROLLOUT}"
    elif learns and first.hands_over and phase is not first:
        takes = f"{crew.tensors(phase.role)} from {first.name}"
    if learns and phase.role in crew.method.trained_on_data:
        takes = f"data, {takes}"
    if phase.hands_over and not crew.workers:
        users = _short([other.name for other in sharing[1:] if other.role != STUDENT])
        gives = f"x0 for {', '.join(users)}" if users else ""
    return Step(phase.name, crew.home(phase.role), phase.role, takes, gives)


def _validate(crew: _Crew) -> Step:
    home = crew.home(STUDENT)
    if not crew.workers:
        return Step("validate", home)
    return Step("validate", ROLLOUT, takes=f"weights from {home}")


def _save(crew: _Crew) -> Step:
    return Step("save", DRIVER if crew.recipe.launch.kind == "ray" else crew.home(STUDENT))


def _short(names: Iterable[str]) -> list[str]:
    """Names, those that only differ in their number as one: "fake_score/0 to 4"."""
    found = []
    for stem, alike in groupby(names, lambda name: name.partition("/")[0]):
        first, *rest = alike
        found.append(f"{first} to {rest[-1].removeprefix(f'{stem}/')}" if rest else first)
    return found


def _steps_table(title: str, steps: Sequence[Step]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("step", "by", "trains"):
        table.add_column(name, no_wrap=True)
    table.add_column("takes", min_width=len(f"x0 from {ROLLOUT}"), overflow="fold")
    table.add_column("hands over", overflow="fold")
    for step in steps:
        table.add_row(step.name, step.group, step.role or "", step.takes, step.gives)
    return table


def _notes(crew: _Crew) -> list[str]:
    """What the steps alone do not tell."""
    recipe, validation = crew.recipe, crew.recipe.validation
    validated = f"validated every {validation.every}, " if validation is not None else ""
    notes = [f"Of all cycles: {validated}saved every {recipe.checkpoint.every}, and the last."]
    if crew.workers:
        made = {phase.rollout for phase in crew.fed(recipe.cycle.warmup_cycles + 1)}
        times = f"{len(made)} times" if len(made) > 1 else "once"
        shared = ", for all phases" if recipe.cycle.fake_batches == "reuse_student" else ""
        notes.append(f"Samples are made {times} a cycle, {recipe.train.batch_size} each{shared}.")
    if recipe.rollout.schedule == "async":
        roles = ", ".join(crew.method.stale_samples)
        notes.append(
            f"async: from cycle 2 on, {roles} learns from samples that were made while the cycle "
            f"before trained, by a student that is an update older; more than "
            f"{recipe.rollout.max_staleness} behind is an error. The samples of the student's own "
            f"phases are made by its current weights."
        )
    if recipe.placement.offload:
        notes.append("offload: only who is awake has weights on the accelerators.")
    return notes
