"""The rollout workers, as the driver sees them: who makes what, and who replaces a lost one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import ray
import torch
from torch import Tensor

from fewstep.config import Recipe
from fewstep.errors import TrainingError
from fewstep.launch.ray.calls import Call, describe_death, failure, gather, is_death
from fewstep.launch.ray.cluster import Cluster
from fewstep.launch.ray.rollouts import RolloutProcess
from fewstep.launch.ray.underway import Sent, Underway
from fewstep.parallel.ranks import share
from fewstep.placement import Seat
from fewstep.training.metrics import logger
from fewstep.validation import ValidationSettings
from fewstep.weights import Confirmation

Take = Callable[[Any], None]
"""Is given the reference of a portion of weights."""
Push = Callable[[Take], Sent]
"""Sends for the student's weights, portion by portion; is answered with what was given."""
# So often in a row a lost worker is replaced before the run gives up.
ATTEMPTS = 3
# The version of workers that have no weights of the student yet.
NONE = -1


@final
@dataclass
class Ordered:
    """Samples of a phase that were asked for, by rank of the trainers.

    Attributes:
        cycle: of the phase.
        name: of the phase.
        data: references of the `ExternalData`.
        versions: student updates that the weights behind them have seen, by rank int64 [b], once
            all of it is there.
        replies: references of what the workers say of it.
        makers: the workers that were asked.
        first: number of the worker that makes those of rank 0; the next makes those of rank 1.
    """

    cycle: int
    name: str
    data: list[Any]
    versions: list[Tensor] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)
    makers: list[Any] = field(default_factory=list)
    first: int = 0

    @property
    def collected(self) -> bool:
        """Whether all of it is there."""
        return bool(self.versions)


@final
class RolloutPool:
    """All rollout workers of a run. One that is lost is replaced, and its work is done again.

    Attributes:
        awake: whether their weights are on the accelerators.
        version: student updates that their weights have seen, or NONE.
    """

    def __init__(
        self,
        cluster: Cluster,
        seats: Sequence[Seat],
        recipe: Recipe,
        model: Any,
        data: Any,
        checkpoint: Path | None,
        underway: Underway,
    ) -> None:
        """Start the workers; they have no weights of the student yet.

        Args:
            cluster: that has places for them.
            seats: one for each.
            recipe: resolved.
            model: reference of a model of the caller's, or None.
            data: reference of a data set of the caller's, or None.
            checkpoint: of a run that is gone on with.
            underway: what the trainers were sent; should they fail, nobody waits for samples.
        """
        self._cluster, self._seats, self._recipe = cluster, list(seats), recipe
        self._given, self._underway = (model, data, checkpoint), underway
        self._timeout = float(recipe.launch.timeout_seconds)
        self._last_loss = ""
        self._open: list[Ordered] = []
        self._next = 0
        self._actors = cluster.start(RolloutProcess, seats, lambda seat: (seat.rank, recipe))
        self._set_up(range(len(seats)))
        self.awake = True
        self.version = NONE

    def bases(self) -> dict[str, Confirmation | None]:
        """By worker the frozen base that the student rests on there; None where there is none."""
        everyone = range(len(self._actors))
        found = self._gather("checksum", everyone, [a.base.remote() for a in self._actors])
        return dict(zip(self._names(everyone), found, strict=True))

    def order(self, cycle: int, name: str, size: int) -> Ordered:
        """Ask for the samples of a phase, for trainers of `size` ranks; does not wait."""
        replies, data, makers = ([None] * size for _ in range(3))
        ordered = Ordered(cycle, name, data, replies=replies, makers=makers, first=self._next)
        # All take part, though there may be more of them than ranks.
        self._next = (self._next + size) % len(self._actors)
        for rank in range(size):
            self._send(ordered, rank)
        # What no phase has wanted in the end must not be kept.
        self._open = [o for o in self._open if o.cycle >= cycle - 1 and not o.collected]
        self._open.append(ordered)
        return ordered

    def collect(self, ordered: Ordered, deliver: Callable[[], None]) -> list[Any]:
        """Wait for samples that were asked for; by rank a reference of `ExternalData`.

        A worker that has died, or does not answer in time, is replaced and given the weights
        again, and what it was to make is made again: by the student as it is now.

        Args:
            ordered: what was asked for.
            deliver: gives all workers the student's weights.

        Raises:
            TrainingError: where workers are lost again and again, or one fails by itself; or as
                soon as trainers fail at what they were sent before.
        """
        what = f"the samples of cycle {ordered.cycle}, {ordered.name}"
        for _ in range(ATTEMPTS):
            if not ordered.collected:
                if self._replaced(ordered):  # elsewhere, and not asked since
                    self._ask_again(deliver)
                makers = [self._maker(ordered, rank) for rank in range(len(ordered.replies))]
                if lost := self._lost(list(zip(makers, ordered.replies, strict=True)), what):
                    self._restart(lost)
                    self._ask_again(deliver)
                    continue
                ordered.versions = self._replies(what, makers, ordered.replies)
            return ordered.data
        raise self._too_often(what)

    def deliver(self, push: Push, cycle: int) -> None:
        """Give all workers the student's weights, and see that they hold them.

        Args:
            push: gives the weights away.
            cycle: for the timeline.

        Raises:
            TrainingError: where a worker holds something else afterwards.
        """
        everyone = range(len(self._actors))
        for _ in range(ATTEMPTS):
            calls: list[tuple[int, Any]] = []
            late: list[Any] = []
            pushed = push(partial(self._hand_on, calls, late, cycle))
            confirmed = [actor.confirm.remote(cycle) for actor in self._actors]
            sent: Confirmation = pushed.answers()[0]
            lost = self._lost([*calls, *zip(everyone, confirmed, strict=True)], "take weights")
            if lost:
                self._restart(lost)
                continue
            self._gather("take weights", [i for i, _ in calls], [ref for _, ref in calls])
            found = self._replies("confirm weights", everyone, confirmed)
            check_confirmed(sent, dict(zip(self._names(everyone), found, strict=True)))
            self.version = sent.version
            return
        raise self._too_often("new weights")

    def _hand_on(
        self, calls: list[tuple[int, Any]], late: list[Any], cycle: int, portion: Any
    ) -> None:
        """Send a portion to all workers, once all have taken the one before it.

        So a whole student need not fit into the store. If one of them does not answer in time,
        nobody is sent any more: it would be waited for again with every portion.
        """
        before = [ref for _, ref in calls[-len(self._actors) :]]
        if before and not late:
            late += ray.wait(before, num_returns=len(before), timeout=self._timeout)[1]
        if not late:
            calls += [
                (i, a.load_weights.remote(portion, cycle)) for i, a in enumerate(self._actors)
            ]

    def sample(self, settings: ValidationSettings, deliver: Callable[[], None]) -> Tensor:
        """The images that validation wants (see `validation_samples`), by all workers together.

        Args:
            settings: how many.
            deliver: gives the workers what they are to sample.
        """
        size = min(len(self._actors), settings.samples)
        shares = [share(settings.samples, size, maker) for maker in range(size)]
        for _ in range(ATTEMPTS):
            calls = [
                (maker, self._actors[maker].sample.remote(settings, mine))
                for maker, mine in enumerate(shares)
            ]
            if lost := self._lost(calls, "make validation samples"):
                self._restart(lost)
                deliver()
                continue
            makers, refs = range(size), [ref for _, ref in calls]
            return torch.cat(self._gather("make validation samples", makers, refs))
        raise self._too_often("validation")

    def sleep(self, cycle: int) -> None:
        """Let the workers give the accelerators' memory back."""
        if self.awake:
            self._all("sleep", cycle)
            self.awake = False

    def wake(self, cycle: int) -> None:
        """Let them take it again, once the trainers have done what they were sent."""
        if not self.awake:
            self._underway.settle()
            self._all("wake", cycle)
            self.awake = True

    def _send(self, ordered: Ordered, rank: int) -> None:
        actor, size = self._actors[self._maker(ordered, rank)], len(ordered.replies)
        ordered.makers[rank] = actor
        ordered.replies[rank], ordered.data[rank] = actor.generate.options(num_returns=2).remote(
            ordered.cycle, ordered.name, rank, size
        )

    def _replaced(self, ordered: Ordered) -> list[int]:
        """Whose samples are to be made by a worker that has been replaced since they were asked."""
        return [
            rank
            for rank, actor in enumerate(ordered.makers)
            if actor is not self._actors[self._maker(ordered, rank)] and not ordered.collected
        ]

    def _maker(self, ordered: Ordered, rank: int) -> int:
        """Which worker makes the samples of a rank."""
        return (ordered.first + rank) % len(self._actors)

    def _lost(self, calls: Sequence[tuple[int, Any]], what: str) -> list[int]:
        """Wait for calls of workers; which of these have died, or have not answered in time.

        An empty list where a worker fails by itself: `gather` says how.
        """
        workers = {ref: worker for worker, ref in calls}
        pending, lost = list(workers), dict[int, str]()
        end = time.monotonic() + self._timeout
        while pending:
            left = max(0.0, end - time.monotonic())
            ready, pending = self._underway.wait_beside(pending, left)
            if not ready:
                late = f"no answer within {self._timeout:g} s (launch.timeout_seconds)"
                lost |= {workers[ref]: late for ref in pending}
                break
            error = failure(ready[0])
            if error is not None and not is_death(error):
                return []
            if error is not None:
                lost[workers[ready[0]]] = describe_death(error)
        for worker, reason in sorted(lost.items()):
            self._last_loss = f"{self._seats[worker].name}: {reason}"
            name = self._seats[worker].name
            logger.warning("%s was lost (%s) and is replaced: %s", name, what, reason)
        return sorted(lost)

    def _too_often(self, what: str) -> TrainingError:
        return TrainingError(
            f"rollout: workers were lost {ATTEMPTS} times in a row at {what}; the last: "
            f"{self._last_loss}"
        )

    def _ask_again(self, deliver: Callable[[], None]) -> None:
        """Give workers that were replaced the student's weights, and all that they are to make."""
        deliver()
        for ordered in self._open:
            for rank in self._replaced(ordered):
                self._send(ordered, rank)

    def _restart(self, lost: Sequence[int]) -> None:
        seats = [self._seats[worker] for worker in lost]
        for seat in seats:
            self._cluster.stop(seat.name)
        started = self._cluster.start(RolloutProcess, seats, lambda seat: (seat.rank, self._recipe))
        for worker, actor in zip(lost, started, strict=True):
            self._actors[worker] = actor
        self._set_up(lost)

    def _set_up(self, workers: Sequence[int]) -> None:
        calls = [self._actors[i].set_up.remote(*self._given) for i in workers]
        self._gather("set up", workers, calls)

    def _all(self, method: str, cycle: int) -> None:
        everyone = range(len(self._actors))
        refs = [getattr(actor, method).remote(cycle) for actor in self._actors]
        if lost := self._lost(list(zip(everyone, refs, strict=True)), method):
            self._restart(lost)
            self.version = NONE
            for worker in lost:  # a new one is awake, and has nothing yet
                refs[worker] = getattr(self._actors[worker], method).remote(cycle)
        self._replies(method, everyone, refs)

    def _replies(self, what: str, workers: Sequence[int], refs: Sequence[Any]) -> list[Any]:
        replies = self._gather(what, workers, refs)
        for reply in replies:
            self._underway.spans(reply.spans)
        return [reply.value for reply in replies]

    def _names(self, workers: Sequence[int]) -> list[str]:
        return [self._seats[worker].name for worker in workers]

    def _gather(self, what: str, workers: Sequence[int], refs: Sequence[Any]) -> list[Any]:
        calls = [Call(r, n, what) for r, n in zip(refs, self._names(workers), strict=True)]
        return gather(calls, self._timeout)


def check_confirmed(sent: Confirmation, found: Mapping[str, Confirmation]) -> None:
    """Raise TrainingError unless all workers hold what was sent; `found`: by worker."""
    wrong = [
        f"{worker} holds version {one.version}, {one.tensors} tensors, checksum {one.checksum[:12]}"
        for worker, one in found.items()
        if one != sent
    ]
    if wrong:
        raise TrainingError(
            f"rollout: weights of version {sent.version}, {sent.tensors} tensors, checksum "
            f"{sent.checksum[:12]} were sent, but {'; '.join(wrong)}"
        )
