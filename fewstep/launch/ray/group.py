"""A trainer group, as the driver sees it: all ranks are called at once, and fail as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from fewstep.config import Recipe
from fewstep.files import FileEntry
from fewstep.launch.ray.calls import Call, gather
from fewstep.launch.ray.cluster import Cluster
from fewstep.launch.ray.trainer import Reply, Report, TrainerProcess
from fewstep.placement import Seat
from fewstep.training.phase import PhaseRequest, PhaseResult
from fewstep.training.timeline import Span
from fewstep.weights import Confirmation

Spans = Callable[[Sequence[Span]], None]


@final
class TrainerGroup:
    """The processes that hold some of the roles, one on each bundle.

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
        spans: Spans,
    ) -> None:
        """Start the processes and let them meet.

        Args:
            cluster: that has places for them.
            name: of the group.
            roles: that it holds.
            seats: by rank.
            recipe: resolved.
            spans: takes what its processes say they did.
        """
        self.name, self.roles = name, tuple(roles)
        self.awake = True
        self._spans, self._names = spans, [seat.name for seat in seats]
        self._portions: dict[str, int] = {}
        self._patience = recipe.launch.timeout_seconds
        self._actors = cluster.start(
            TrainerProcess, seats, lambda seat: (name, seat.rank, len(seats), recipe)
        )
        address, port = gather(
            [Call(self._actors[0].open.remote(), self._names[0], "open a port")]
        )[0]
        self.call("join", address, port)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks with the same arguments; what each has given, by rank."""
        return self._gather(method, [self._call(a, method, *arguments) for a in self._actors])

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
    ) -> PhaseResult:
        """Run a phase on all ranks.

        Args:
            request: the phase.
            given: by rank a reference of `ExternalData`; None: nothing.
            versions: student updates that may be behind it.
        """
        refs = given or [None] * len(self._actors)
        calls = [
            self._call(actor, "run_phase", request, ref, versions)
            for actor, ref in zip(self._actors, refs, strict=True)
        ]
        result: PhaseResult = self._replies(in_words(request), calls)[0]
        return result

    def score(self, request: PhaseRequest, given: Sequence[Any], versions: range) -> list[Any]:
        """Score student samples for a phase of another group; by rank a reference."""
        pairs = [
            actor.score.options(num_returns=2).remote(request, ref, versions)
            for actor, ref in zip(self._actors, given, strict=True)
        ]
        self._replies(f"{in_words(request)}, scores", [reply for reply, _ in pairs])
        return [found for _, found in pairs]

    def sleep(self, cycle: int) -> None:
        """Move weights and optimizers to main memory, unless they are there."""
        if self.awake:
            self._replies("sleep", [self._call(a, "sleep", cycle) for a in self._actors])
            self.awake = False

    def wake(self, cycle: int) -> None:
        """Move them back to the accelerators, unless they are there."""
        if not self.awake:
            self._replies("wake", [self._call(a, "wake", cycle) for a in self._actors])
            self.awake = True

    def push(
        self, role: str, bucket_mib: int, cycle: int, version: int, take: Callable[[Any], None]
    ) -> Confirmation:
        """Give a role's weights away, portion by portion.

        Args:
            role: whose.
            bucket_mib: size of a portion.
            cycle: for the timeline.
            version: of these weights.
            take: is given the reference of each portion: `Packed` tensors by canonical name.

        Returns:
            What was given away.
        """
        if role not in self._portions:
            self._portions[role] = self.call("portions", role, bucket_mib)[0]
        sent: Confirmation | None = None
        for portion in range(self._portions[role]):
            pairs = [
                actor.push.options(num_returns=2).remote(role, portion, version, cycle)
                for actor in self._actors
            ]
            take(pairs[0][1])
            sent = self._replies("push", [reply for reply, _ in pairs])[0]
        assert sent is not None
        return sent

    def write(
        self, draft: Path, part: str, skipped: Sequence[str], cycle: int, behind: bool
    ) -> Mapping[str, Any]:
        """Write the group's tensors into a checkpoint in the making; its state without them."""
        calls = [self._call(a, "write", draft, part, skipped, cycle, behind) for a in self._actors]
        state: Mapping[str, Any] = self._replies("save", calls)[0]
        return state

    def is_written(self) -> bool:
        """Whether that is finished."""
        return all(self.call("is_written"))

    def written(self) -> Mapping[str, FileEntry]:
        """Its files, once they are finished."""
        files: Mapping[str, FileEntry] = self.call("written")[0]
        return files

    def _call(self, actor: Any, method: str, *arguments: Any) -> Any:
        return getattr(actor, method).remote(*arguments)

    def _gather(self, what: str, refs: Sequence[Any]) -> list[Any]:
        calls = [Call(r, n, what) for r, n in zip(refs, self._names, strict=True)]
        return gather(calls, patience_seconds=self._patience)

    def _replies(self, what: str, refs: Sequence[Any]) -> list[Any]:
        replies: list[Reply] = self._gather(what, refs)
        for reply in replies:
            self._spans(reply.spans)
        return [reply.value for reply in replies]


def in_words(request: PhaseRequest) -> str:
    """A phase, as errors name it."""
    return f"cycle {request.cycle}, phase {request.name} (role {request.role})"
