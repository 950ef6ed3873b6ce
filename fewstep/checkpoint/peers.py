"""Steps that all ranks take together: what fails on one is an error on all, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fewstep.errors import TrainingError, UserError
from fewstep.files import failure_to_write
from fewstep.parallel.ranks import SINGLE, Ranks

T = TypeVar("T")


class _FailedElsewhere(Exception):
    """This rank took its step; another has failed in the same one."""


@final
@dataclass(frozen=True)
class _Failure:
    """What went wrong on a rank, in a form that any process can receive.

    Attributes:
        kind: "disk", "user", "elsewhere" or "other".
        reason: in words.
    """

    kind: str
    reason: str


@final
@dataclass(frozen=True)
class Peers:
    """The ranks that write or read one checkpoint together.

    Attributes:
        ranks: of the run.
        group: what they talk through; None: the run's own group. Two threads must not share one.
    """

    ranks: Ranks = SINGLE
    group: dist.ProcessGroup | None = None

    def gather(self, value: T) -> list[T]:
        """Every rank's value (anything small), on every rank."""
        if self.ranks.size == 1:
            return [value]
        found: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(found, value, group=self.group)
        return cast(list[T], found)

    def each(self, step: Callable[[], T], undo: Callable[[], None] = lambda: None) -> list[T]:
        """Take a step on every rank; what each has found.

        Args:
            step: of this rank.
            undo: what rank 0 does where any has failed, before any goes on.

        Raises:
            OSError: where any rank could not write or read, naming rank and reason.
            UserError: where any rank raised one, with the rank.
            TrainingError: for any other failure of another rank; this rank's own is raised as is.
        """
        if self.ranks.size == 1:
            try:
                return [step()]
            except Exception:
                undo()
                raise
        error: Exception | None = None
        found: tuple[T | None, _Failure | None]
        try:
            found = (step(), None)
        except Exception as caught:
            error = caught
            found = (None, describe(caught))
        gathered = self.gather(found)
        failures = {r: f for r, (_, f) in enumerate(gathered) if f is not None}
        if failures:
            if self.ranks.first:
                undo()
            self.gather(None)
            raise_first(failures, error)
        return [cast(T, value) for value, _ in gathered]

    def first(self, step: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Let rank 0 take a step while the others wait; what it has found (see `each`)."""
        mine = cast(Callable[[], T], lambda: None)
        return self.each(step if self.ranks.first else mine, undo)[0]

    def through_torch(self, step: Callable[[], object]) -> None:
        """Call something of torch.distributed.checkpoint, which agrees on failures by itself.

        Raises:
            Exception: what failed on this rank; `each` makes of it what failed anywhere.
        """
        try:
            step()
        except CheckpointException as error:
            mine = error.failures.get(self.ranks.rank)
            raise mine[0] if mine is not None else _FailedElsewhere() from None


def describe(error: Exception) -> _Failure:
    """A failure as the other ranks are told of it."""
    if isinstance(error, _FailedElsewhere):
        return _Failure("elsewhere", "another rank failed")
    if isinstance(error, UserError):
        return _Failure("user", str(error))
    if reason := failure_to_write(error):
        return _Failure("disk", reason)
    return _Failure("other", f"{type(error).__name__}: {error}")


def raise_first(failures: dict[int, _Failure], mine: Exception | None) -> None:
    """Raise the failure of the lowest rank that has one of its own: the same on all ranks."""
    own = {r: f for r, f in failures.items() if f.kind != "elsewhere"} or failures
    rank = min(own)
    failure = own[rank]
    message = f"rank {rank}: {failure.reason}"
    if failure.kind == "disk":
        raise OSError(message) from mine
    if failure.kind == "user":
        raise UserError(message) from mine
    if mine is not None and not isinstance(mine, _FailedElsewhere):
        raise mine
    raise TrainingError(message) from mine
