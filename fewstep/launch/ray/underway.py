"""Calls of trainer groups that the driver has sent and not yet waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray

from fewstep.launch.ray.calls import Call, failure, gather
from fewstep.training.timeline import Span


@final
@dataclass(frozen=True)
class Reply:
    """What a call has given, and what it took."""

    value: Any
    spans: tuple[Span, ...] = ()


@final
class Sent:
    """A call of all ranks of a group, on its way.

    Attributes:
        group: that was called.
        calls: by rank.
        found: what each rank has given, once it was waited for.
    """

    def __init__(self, underway: Underway, group: str, calls: Sequence[Call]) -> None:
        """`underway`: knows what was sent before."""
        self._underway, self.group, self.calls = underway, group, tuple(calls)
        self.found: list[Any] | None = None

    def answers(self) -> list[Any]:
        """What each rank has given, by rank, once all that was sent before has been done.

        Raises:
            TrainingError: see `gather`; of this call, or of one before it.
        """
        while self.found is None:
            self._underway.take_first()
        return self.found


@final
class Underway:
    """All calls of groups that are on their way, in the order in which they are to be done.

    So the driver need not wait for one call before it sends the next: the processes of a group do
    what they are sent one after the other, and a call of another group is sent with references of
    what it has to wait for (`before`). Answers are waited for in order as well, so what is told of
    a failure is what has failed first. A process that has failed refuses what it was sent for
    after that.
    """

    def __init__(self, patience_seconds: float, spans: Callable[[Sequence[Span]], None]) -> None:
        """Nothing is on its way.

        Args:
            patience_seconds: how long to wait for the other ranks, once one has answered.
            spans: takes what processes say they did.
        """
        self._patience, self.spans = patience_seconds, spans
        self._queue: deque[Sent] = deque()
        self._watched: list[Any] = []  # what has not been seen to end well

    def send(self, group: str, calls: Sequence[Call]) -> Sent:
        """Note a call of all ranks of a group, that was sent."""
        sent = Sent(self, group, calls)
        self._queue.append(sent)
        self._watched += [call.ref for call in calls]
        return sent

    def before(self, group: str) -> list[Any]:
        """What the next call of a group has to wait for: references, to be sent along with it.

        Ray keeps the order within a group. If the last call is of another group, that one must
        have finished, on all ranks.
        """
        same = bool(self._queue) and self._queue[-1].group == group
        return [] if same else self.last()

    def last(self) -> list[Any]:
        """The same for a call that must not be done by some ranks only, if that one fails on one.

        References of what was sent last, to whichever group.
        """
        return [call.ref for call in self._queue[-1].calls] if self._queue else []

    def take_first(self) -> None:
        """Wait for the call that was sent first; its processes' spans are handed on.

        Raises:
            TrainingError: see `gather`. Then nothing counts as on its way any more: the run ends,
                and who still calls a group must not wait for what followed.
        """
        sent = self._queue.popleft()
        done = {call.ref for call in sent.calls}
        self._watched = [ref for ref in self._watched if ref not in done]
        try:
            found = gather(sent.calls, patience_seconds=self._patience)
        except BaseException:
            self._queue.clear()
            self._watched.clear()
            raise
        for reply in found:
            if isinstance(reply, Reply):
                self.spans(reply.spans)
        sent.found = [r.value if isinstance(r, Reply) else r for r in found]

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        while self._queue:
            self.take_first()

    def wait_beside(
        self, refs: Sequence[Any], timeout_seconds: float
    ) -> tuple[list[Any], list[Any]]:
        """`ray.wait` for the next of some other references, unless one of these calls fails first.

        Raises:
            TrainingError: as soon as one has failed, see `gather`.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, end - time.monotonic())
            ready, _ = ray.wait([*refs, *self._watched], num_returns=1, timeout=left)
            if not ready or ready[0] in refs:
                return ready, [ref for ref in refs if ref not in ready]
            if failure(ready[0]) is not None:
                self.settle()
            self._watched.remove(ready[0])
