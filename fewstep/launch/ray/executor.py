"""Carries phases to trainer groups, with all that they need of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch

from fewstep.config import Recipe
from fewstep.data.conditions import Conditions
from fewstep.grouping import group_of, scoring_group
from fewstep.launch.ray.group import TrainerGroup
from fewstep.launch.ray.pool import Ordered, RolloutPool, Take
from fewstep.launch.ray.underway import Sent
from fewstep.roles.role import STUDENT
from fewstep.sampling import Samples
from fewstep.training.cycle import plan_cycle
from fewstep.training.phase import PhaseRequest, PhaseResult
from fewstep.training.timeline import DRIVER, Timeline
from fewstep.validation import ValidationSettings, sampled_role


@final
class GroupExecutor:
    """Runs each phase on the group that holds its role, one group at a time.

    Before a phase, what it needs of roles that live elsewhere is made: student samples by the
    rollout workers, scores by the group that holds those roles. Only references pass through here.

    The phases of a cycle are sent one after the other and waited for at its end (see `Underway`),
    so that no group has nothing to do while this process gets round to it. What is waited for at
    once are samples and that the rollout workers hold the student, as a lost one is replaced.

    Attributes:
        groups: by name, in the order in which they train.
        timeline: where it is written down what took how long.
        version: successful updates of the student.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: Mapping[str, TrainerGroup],
        pool: RolloutPool | None,
        timeline: Timeline,
        version: int,
        conditions: Callable[[int], Conditions],
        ahead: Sequence[Ordered] = (),
    ) -> None:
        """Begin between two cycles.

        Args:
            recipe: resolved.
            groups: by name, in the order in which they train, all set up.
            pool: the rollout workers, if there are any.
            timeline: where it is written down what took how long.
            version: successful updates of the student so far.
            conditions: number of samples -> what validation's are conditioned on.
            ahead: samples of the next cycle that were made before the run was interrupted.
        """
        self._recipe, self._method = recipe, recipe.method.build()
        self.groups, self._pool, self.timeline = dict(groups), pool, timeline
        self._placed = {name: group.roles for name, group in groups.items()}
        self.version = version
        self._conditions = conditions
        self._orders = {(o.cycle, o.name): o for o in ahead}
        self._cycle = 0

    def run_phases(self, requests: Sequence[PhaseRequest]) -> list[PhaseResult]:
        """See `Executor.run_phases`."""
        sent = [self._send(request) for request in requests]
        return [self._result(phase, staleness) for phase, staleness in sent]

    def _send(self, request: PhaseRequest) -> tuple[Sent, dict[str, float]]:
        """Send a phase to its group; with what its metrics will say of its samples."""
        self._cycle = request.cycle
        group = self._group_of(request.role)
        given, versions = self._given(request)
        self.wake(group)
        sent = group.run_phase(request, given, versions)
        staleness = self._staleness(request)
        if request.role == STUDENT and self._pool is not None:
            # Along with it (if the workers are awake), before another group takes its place.
            self._deliver_student()
        return sent, staleness

    def _result(self, sent: Sent, staleness: Mapping[str, float] | None = None) -> PhaseResult:
        result: PhaseResult = sent.answers()[0]
        if result.request.role == STUDENT:
            self.version = int(result.metrics["updates"])
        return replace(result, metrics={**result.metrics, **(staleness or {})})

    def _staleness(self, request: PhaseRequest) -> dict[str, float]:
        """How many updates the samples of a phase are behind, where they may be."""
        if not self._may_be_old(request):
            return {}
        behind = self.version - torch.cat(self._orders[request.cycle, request.rollout].versions)
        return {"staleness": float(behind.double().mean()), "staleness_most": int(behind.max())}

    def sample(self, settings: ValidationSettings) -> Samples | None:
        """What the student is validated by: made by the rollout workers, if there are any."""
        if self.version == 0:
            return None
        with self.timeline.measure("validate", DRIVER, "validation", self._cycle):
            if self._pool is not None:
                return self._sample_elsewhere(self._pool, settings)
            group = self._group_of(STUDENT)
            self.wake(group)
            samples: Samples | None = group.call("validation_samples", settings)[0]
            return samples

    def _sample_elsewhere(self, pool: RolloutPool, settings: ValidationSettings) -> Samples:
        """Samples of the rollout workers, which hold the role that is judged for so long."""
        role = sampled_role(self._recipe.roles)
        deliver = partial(self._deliver, role)
        # One that has died asleep is replaced now, and has no weights yet.
        pool.wake(self._cycle)
        if role != STUDENT or pool.version != self.version:
            deliver()
        images = pool.sample(settings, deliver)
        if role != STUDENT:
            self._deliver_student()
        return Samples(images, self._conditions(settings.samples), 0.0, 0)

    def wake(self, group: TrainerGroup) -> None:
        """Let a group take the accelerators, all others giving them up first."""
        self._let_in(group, beside_rollouts=self._runs_ahead)

    def leave(self) -> None:
        """Let the ranks of every group take leave of each other."""
        for group in self.groups.values():
            group.call("leave")

    def ahead(self) -> list[Ordered]:
        """Samples of the next cycle, finished; the rollout workers rest until they are used."""
        found = [o for (cycle, _), o in self._orders.items() if cycle > self._cycle]
        for ordered in found:
            self._collect(ordered)
        return found

    def _given(self, request: PhaseRequest) -> tuple[Sequence[Any] | None, range]:
        """By rank, what a phase needs of roles in other groups; and how old it may be."""
        now = range(self.version, self.version + 1)
        scoring = scoring_group(self._placed, self._method, request.role)
        if scoring is not None:
            samples, scorer = self._samples(request), self.groups[scoring]
            self.wake(scorer)
            return scorer.score(request, samples, now), now
        if self._pool is None or request.role == STUDENT:
            return None, now
        behind = self._recipe.rollout.max_staleness if self._may_be_old(request) else 0
        return self._samples(request), range(self.version - behind, self.version + 1)

    def _samples(self, request: PhaseRequest) -> list[Any]:
        """References of the student samples of a phase, by rank; those of its cycle are ordered."""
        self._order(request.cycle)
        return self._collect(self._orders[request.cycle, request.rollout])

    def _order(self, cycle: int) -> None:
        """Ask for all samples of a cycle that were not asked for, and for what goes ahead."""
        self._orders = {key: o for key, o in self._orders.items() if key[0] >= cycle}
        wanted = [(cycle, name) for name in self._rollouts(cycle, ahead=False)]
        if self._runs_ahead:
            # After the last cycle too: a run that is extended goes on as if it had never ended.
            wanted += [(cycle + 1, name) for name in self._rollouts(cycle + 1, ahead=True)]
        missing = [key for key in wanted if key not in self._orders]
        if not missing or self._pool is None:
            return
        if self._recipe.placement.offload:
            self._pool.wake(self._cycle)
        if self._pool.version != self.version:
            self._deliver_student()
        size = self._recipe.launch.processes
        for key in missing:
            self._orders[key] = self._pool.order(*key, size)

    def _rollouts(self, cycle: int, ahead: bool) -> list[str]:
        """The samples of a cycle that rollout workers make; `ahead`: those that may be old."""
        found = []
        scores_itself = scoring_group(self._placed, self._method, STUDENT) is None
        k, followers = self._method.fake_updates_per_student, self._method.followers
        for request in plan_cycle(cycle, k, self._recipe.cycle, followers):
            own = request.role == STUDENT and scores_itself
            old = request.role in self._method.stale_samples
            if not own and (old or not ahead):
                found.append(request.rollout)
        return list(dict.fromkeys(found))

    def _collect(self, ordered: Ordered) -> list[Any]:
        assert self._pool is not None
        return self._pool.collect(ordered, self._deliver_student)

    def _deliver_student(self) -> None:
        """Let the rollout workers have the student as it is now."""
        self._deliver(STUDENT)

    def _deliver(self, role: str) -> None:
        assert self._pool is not None
        self._pool.wake(self._cycle)
        self._pool.deliver(partial(self._push, role), self._cycle)
        self.version = self._pool.version

    def _push(self, role: str, take: Take) -> Sent:
        group = self._group_of(role)
        self._let_in(group, beside_rollouts=True)  # they take its weights
        bucket = self._recipe.rollout.bucket_mib
        return group.push(role, bucket, self._cycle, take)

    def _let_in(self, group: TrainerGroup, beside_rollouts: bool) -> None:
        if not self._recipe.placement.offload:
            return
        for other in self.groups.values():
            if other is not group:
                other.sleep(self._cycle)
        if self._pool is not None and not beside_rollouts:
            self._pool.sleep(self._cycle)
        group.wake(self._cycle)

    def _may_be_old(self, request: PhaseRequest) -> bool:
        """Whether a phase learns from samples that may be those of an older student."""
        return self._runs_ahead and request.role in self._method.stale_samples

    @property
    def _runs_ahead(self) -> bool:
        return self._recipe.rollout.schedule == "async"

    def _group_of(self, role: str) -> TrainerGroup:
        return self.groups[group_of(self._placed, role)]
