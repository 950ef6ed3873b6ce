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
    """

    def __init__(self, underway: Underway, group: str, calls: Sequence[Call]) -> None:
        """`underway`: knows what was sent before."""
        self._underway, self.group, self.calls = underway, group, tuple(calls)
        self._found: list[Any] | None = None

    @property
    def is_back(self) -> bool:
        """Whether its answers were waited for."""
        return self._found is not None

    def answers(self) -> list[Any]:
        """What each rank has given, by rank, once all that was sent before has been done.

        Raises:
            TrainingError: see `gather`; of this call, or of one before it.
        """
        self._underway.wait_for(self)
        assert self._found is not None
        return self._found

    def put_back(self, found: list[Any]) -> None:
        """Keep what was found."""
        self._found = found


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

    def send(self, group: str, calls: Sequence[Call]) -> Sent:
        """Note a call of all ranks of a group, that was sent."""
        sent = Sent(self, group, calls)
        self._queue.append(sent)
        return sent

    def before(self, group: str) -> list[Any]:
        """What the next call of a group has to wait for: references, to be sent along with it.

        Ray keeps the order within a group. If the last call is of another group, that one must
        have finished, on all ranks.
        """
        if not self._queue or self._queue[-1].group == group:
            return []
        return [call.ref for call in self._queue[-1].calls]

    def wait_for(self, sent: Sent) -> None:
        """Wait for the answers of a call, and of all before it; see `Sent.answers`."""
        while not sent.is_back:
            self._take_first()

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        while self._queue:
            self._take_first()

    def wait_beside(
        self, refs: Sequence[Any], timeout_seconds: float
    ) -> tuple[list[Any], list[Any]]:
        """`ray.wait` for the next of some other references, unless one of these calls fails first.

        Raises:
            TrainingError: as soon as one has failed, see `gather`.
        """
        end = time.monotonic() + timeout_seconds
        watched = [call.ref for sent in self._queue for call in sent.calls]
        while True:
            left = max(0.0, end - time.monotonic())
            ready, _ = ray.wait([*refs, *watched], num_returns=1, timeout=left)
            if not ready or ready[0] not in watched:
                return ready, [ref for ref in refs if ref not in ready]
            if failure(ready[0]) is not None:
                self.settle()
            watched.remove(ready[0])

    def _take_first(self) -> None:
        sent = self._queue.popleft()
        try:
            found = gather(sent.calls, patience_seconds=self._patience)
        except BaseException:
            self._queue.clear()  # the run ends; who still calls must not wait for what follows
            raise
        for reply in found:
            if isinstance(reply, Reply):
                self.spans(reply.spans)
        sent.put_back([r.value if isinstance(r, Reply) else r for r in found])
