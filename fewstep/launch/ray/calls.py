"""Waiting for calls of several processes, and finding out which of them has failed first."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from fewstep.errors import TrainingError, UserError
from fewstep.parallel.failures import PLACE, is_loss

# How long the others get to say what they know, once one call has failed: a process that was lost
# is seen by its peers, who only have lost it, before the cluster sees it.
GRACE_SECONDS = 2.0


@final
@dataclass(frozen=True)
class Call:
    """A call that was sent.

    Attributes:
        ref: what it will give.
        who: the process that was called, as in "critic/1".
        what: it was asked for, in words.
    """

    ref: Any
    who: str
    what: str


@final
class RemoteTraceback(Exception):
    """Where an error of another process came from: its traceback, as text."""


def gather(calls: Sequence[Call], timeout_seconds: float | None = None) -> list[Any]:
    """What all calls have given, in their order; returns as soon as one has failed.

    Args:
        calls: sent.
        timeout_seconds: how long to wait for all; None: for ever.

    Raises:
        UserError: a user's mistake, as it is.
        TrainingError: for any other failure: of the process that has caused it, with its place,
            caused by the remote traceback; or where there was no answer in time.
    """
    by_ref = {call.ref: call for call in calls}
    pending, failed = list(by_ref), {}
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while pending:
        left = None if end is None else max(0.0, end - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not ready:
            break
        error = failure(ready[0])
        if error is not None:
            failed[ready[0]] = error
            end = min(end or float("inf"), time.monotonic() + GRACE_SECONDS)
    if failed:
        raise_cause(
            [(by_ref[ref], error) for ref, error in failed.items()],
            [by_ref[ref].who for ref in pending],
        )
    if pending:
        names = ", ".join(by_ref[ref].who for ref in pending)
        what = by_ref[pending[0]].what
        raise TrainingError(f"{names}: no answer within {timeout_seconds:g} s to: {what}")
    return [ray.get(call.ref) for call in calls]


def failure(ref: Any) -> Exception | None:
    """How a call that has ended has failed, or None."""
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return None
    except Exception as error:
        return error
    return None


def is_death(error: Exception) -> bool:
    """Whether the process that was called is gone, or what it has made is."""
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def raise_cause(failed: Sequence[tuple[Call, Exception]], silent: Sequence[str]) -> NoReturn:
    """Raise what has caused several failures.

    What a process says of itself comes first, then that one has died, and last what others say
    who have only lost it.

    Args:
        failed: calls and their errors, at least one.
        silent: processes that have not answered.
    """
    call, error = min(failed, key=lambda pair: rank_failure(pair[1]))
    if is_death(error):
        raise TrainingError(f"{call.who}: {call.what}: {describe_death(error)}") from error
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, UserError):
        raise UserError(str(cause)) from error
    message = describe(call, cause)
    if silent and is_loss(cause):
        message += f" ({', '.join(silent)} did not answer)"
    # Ray's error is its remote traceback, as text.
    raise TrainingError(message) from RemoteTraceback(f"in {call.who}:\n{error}")


def rank_failure(error: Exception) -> int:
    """0 for what a process says of itself, 1 where it has died, 2 where it has lost another."""
    if is_death(error):
        return 1
    cause = error.cause if isinstance(error, RayTaskError) else error
    return 2 if is_loss(cause) else 0


def describe(call: Call, cause: BaseException) -> str:
    """An error with its place: group, rank, and cycle and phase where it says so itself."""
    group = call.who.partition("/")[0]
    if PLACE.match(str(cause)):
        return f"group {group}, {cause}"
    kind = "" if isinstance(cause, TrainingError) else f"{type(cause).__name__}: "
    return f"{call.who}: {call.what}: {kind}{cause}"


def describe_death(error: Exception) -> str:
    """That a process has died, and what the cluster knows of it."""
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|\n|$)", str(error))
    known = f": {detail.group(1).rstrip('.')}" if detail else ""
    return f"the process has died{known}"


def is_lost_actor(error: Exception) -> bool:
    """Whether it is the process itself that is gone."""
    return isinstance(error, RayActorError)
