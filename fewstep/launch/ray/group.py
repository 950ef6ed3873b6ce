"""A trainer group, as the driver sees it: all ranks are called at once, and fail as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from fewstep.config import Recipe
from fewstep.files import FileEntry
from fewstep.launch.ray.calls import Call
from fewstep.launch.ray.cluster import Cluster
from fewstep.launch.ray.trainer import Report, TrainerProcess
from fewstep.launch.ray.underway import Sent, Underway
from fewstep.placement import Seat
from fewstep.training.phase import PhaseRequest
from fewstep.weights import Confirmation


@final
class TrainerGroup:
    """The processes that hold some of the roles, one on each bundle.

    What gives `Sent` does not wait, nor do `score`, `sleep` and `wake`; everything else waits for
    all that was sent before, too.

    Attributes:
        name: of the group.
        roles: that it holds.
        awake: whether its weights are on the accelerators.
        reports: what each of its ranks has found when it was set up.
    """

    reports: list[Report]

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        roles: Sequence[str],
        seats: Sequence[Seat],
        recipe: Recipe,
        underway: Underway,
    ) -> None:
        """Start the processes and let them meet.

        Args:
            cluster: that has places for them.
            name: of the group.
            roles: that it holds.
            seats: by rank.
            recipe: resolved.
            underway: what was sent, and not yet waited for, of all groups.
        """
        self.name, self.roles = name, tuple(roles)
        self.awake = True
        self._underway, self._names = underway, [seat.name for seat in seats]
        self._portions: dict[str, int] = {}
        self._actors = cluster.start(
            TrainerProcess, seats, lambda seat: (name, seat.rank, len(seats), recipe)
        )
        opened = Call(self._actors[0].open.remote(), self._names[0], "open a port")
        ((address, port),) = underway.send(name, [opened]).answers()
        self.call("join", address, port)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks with the same arguments; what each has given, by rank."""
        self._underway.settle()
        return self._send_all(method, method, *arguments).answers()

    @property
    def report(self) -> Report:
        """What its first rank has found."""
        return self.reports[0]

    def set_up(self, model: Any, dataset: Any, checkpoint: Path | None) -> list[Report]:
        """Build the workers; what each rank has found.

        Args:
            model: reference of a model of the caller's, or None.
            dataset: the same of a data set.
            checkpoint: to go on from.
        """
        self.reports = self.call("set_up", self.roles, model, dataset, checkpoint)
        return self.reports

    def base(self) -> Confirmation | None:
        """The frozen base that its roles rest on, by its checksum; None where there is none."""
        was_awake = self.awake
        self.wake(cycle=0)
        found: Confirmation | None = self.call("base")[0]
        if not was_awake:
            self.sleep(cycle=0)
        return found

    def run_phase(
        self, request: PhaseRequest, given: Sequence[Any] | None, versions: range
    ) -> Sent:
        """Run a phase on all ranks; they answer with its `PhaseResult`.

        Args:
            request: the phase.
            given: by rank a reference of `ExternalData`; None: nothing.
            versions: student updates that may be behind it.
        """
        refs = given or [None] * len(self._actors)
        calls = [
            actor.run_phase.remote(request, ref, versions, *self._before)
            for actor, ref in zip(self._actors, refs, strict=True)
        ]
        return self._send(in_words(request), calls)

    def score(self, request: PhaseRequest, given: Sequence[Any], versions: range) -> list[Any]:
        """Score student samples for a phase of another group; by rank a reference, on its way."""
        pairs = [
            actor.score.options(num_returns=2).remote(request, ref, versions, *self._before)
            for actor, ref in zip(self._actors, given, strict=True)
        ]
        self._send(f"{in_words(request)}, scores", [reply for reply, _ in pairs])
        return [found for _, found in pairs]

    def sleep(self, cycle: int) -> None:
        """Send: move weights and optimizers to main memory, unless they are there."""
        if self.awake:
            self._send_all("sleep", "sleep", cycle, *self._before)
            self.awake = False

    def wake(self, cycle: int) -> None:
        """Send: move them back to the accelerators, unless they are there."""
        if not self.awake:
            self._send_all("wake", "wake", cycle, *self._before)
            self.awake = True

    def push(self, role: str, bucket_mib: int, cycle: int, take: Callable[[Any], None]) -> Sent:
        """Give a role's weights away, portion by portion; the last one is not waited for.

        Args:
            role: whose.
            bucket_mib: size of a portion.
            cycle: for the timeline.
            take: is given the reference of each `Portion`.

        Returns:
            What the first rank answers to is what was given away, a `Confirmation`.
        """
        if role not in self._portions:
            self._portions[role] = self.call("portions", role, bucket_mib)[0]
        sent: Sent | None = None
        for portion in range(self._portions[role]):
            if sent is not None:
                sent.answers()
            last = self._underway.last()
            pairs = [
                actor.push.options(num_returns=2).remote(role, portion, cycle, *last)
                for actor in self._actors
            ]
            sent = self._send("push", [reply for reply, _ in pairs])
            take(pairs[0][1])
        assert sent is not None
        return sent

    def write(
        self, draft: Path, part: str, skipped: Sequence[str], cycle: int, behind: bool
    ) -> Mapping[str, Any]:
        """Write the group's tensors into a checkpoint in the making; its state without them."""
        self._underway.settle()
        sent = self._send_all("save", "write", draft, part, skipped, cycle, behind)
        state: Mapping[str, Any] = sent.answers()[0]
        return state

    def is_written(self) -> bool:
        """Whether that is finished."""
        return all(self.call("is_written"))

    def written(self) -> Mapping[str, FileEntry]:
        """Its files, once they are finished."""
        files: Mapping[str, FileEntry] = self.call("written")[0]
        return files

    @property
    def _before(self) -> list[Any]:
        return self._underway.before(self.name)

    def _send_all(self, what: str, method: str, *arguments: Any) -> Sent:
        return self._send(what, [getattr(a, method).remote(*arguments) for a in self._actors])

    def _send(self, what: str, refs: Sequence[Any]) -> Sent:
        calls = [Call(ref, name, what) for ref, name in zip(refs, self._names, strict=True)]
        return self._underway.send(self.name, calls)


def in_words(request: PhaseRequest) -> str:
    """A phase, as errors name it."""
    return f"cycle {request.cycle}, phase {request.name} (role {request.role})"
