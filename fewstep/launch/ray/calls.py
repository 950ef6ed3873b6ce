"""Waiting for calls of several processes, and finding out which of them has failed first."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn, final

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from fewstep.errors import TrainingError, UserError
from fewstep.parallel.failures import PLACE, TIMED_OUT, is_loss, loss_reason

# How long the others get to say what they know, once one call has failed.
GRACE_SECONDS = 2.0
# The same where it only says that another process has gone: that one's peers see it at once, the
# cluster a little later, and much later on a machine that is busy.
LOSS_GRACE_SECONDS = 15.0


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

    @property
    def place(self) -> str:
        """Who was asked for what, as in "group critic, rank 1, cycle 3, phase student ..."."""
        group, _, rank = self.who.partition("/")
        return f"group {group}, rank {rank}, {self.what}"


@final
class RemoteTraceback(Exception):
    """Where an error of another process came from: its traceback, as text."""


class Kind(IntEnum):
    """What a failed call says, the most telling first."""

    OWN = 0
    """What was wrong in the process itself."""
    DEATH = 1
    """That the process is gone, or what it has made is."""
    LATE = 2
    """That another process does not answer."""
    LOSS = 3
    """That another process has gone."""


def gather(
    calls: Sequence[Call],
    timeout_seconds: float | None = None,
    patience_seconds: float | None = None,
) -> list[Any]:
    """What all calls have given, in their order; returns as soon as one has failed.

    Args:
        calls: sent.
        timeout_seconds: how long to wait for all; None: for ever.
        patience_seconds: how long to wait for the others once one has answered, or has waited for
            them itself (launch.timeout_seconds); None: for ever.

    Raises:
        UserError: a user's mistake, as it is.
        TrainingError: for any other failure: of the process that has caused it, with its place,
            caused by the remote traceback; or where there was no answer in time.
    """
    by_ref = {call.ref: call for call in calls}
    pending, failed = list(by_ref), dict[Call, Exception]()
    start, limit = time.monotonic(), timeout_seconds
    while pending:
        left = None if limit is None else max(0.0, start + limit - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not ready:
            break
        if error := failure(ready[0]):
            failed[by_ref[ready[0]]] = error
        gone = time.monotonic() - start
        if failed:
            limit = min(limit or float("inf"), gone + grace(failed))
        elif patience_seconds is not None:
            limit = min(limit or float("inf"), gone + patience_seconds)
    silent = [by_ref[ref] for ref in pending]
    if failed:
        raise_cause(failed, silent, patience_seconds)
    if silent:
        names = ", ".join(call.who for call in silent)
        seconds = timeout_seconds if len(silent) == len(calls) else patience_seconds
        seconds = timeout_seconds if seconds is None else seconds
        raise TrainingError(
            f"{silent[0].place}: {names} did not answer within {seconds:g} s "
            f"(launch.timeout_seconds)"
        )
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


def kind_of(error: Exception) -> Kind:
    """What an error of a call says."""
    if is_death(error):
        return Kind.DEATH
    cause = cause_of(error)
    if not is_loss(cause):
        return Kind.OWN
    return Kind.LATE if TIMED_OUT.search(str(cause)) else Kind.LOSS


def cause_of(error: Exception) -> Exception:
    """The error as it was in the process that has raised it."""
    return error.cause if isinstance(error, RayTaskError) else error


def grace(failed: Mapping[Call, Exception]) -> float:
    """Seconds to wait for what others have to say."""
    known = min(kind_of(error) for error in failed.values())
    return LOSS_GRACE_SECONDS if known == Kind.LOSS else GRACE_SECONDS


def raise_cause(
    failed: Mapping[Call, Exception], silent: Sequence[Call], patience_seconds: float | None
) -> NoReturn:
    """Raise what has caused several failures.

    What a process says of itself comes first, then that one has died, and last what others say
    who have only lost it.

    Args:
        failed: calls and their errors, at least one.
        silent: calls without an answer.
        patience_seconds: how long processes wait for one another.
    """
    call, error = min(failed.items(), key=lambda pair: kind_of(pair[1]))
    kind, cause = kind_of(error), cause_of(error)
    if kind == Kind.DEATH:
        raise TrainingError(f"{call.place}: {describe_death(error)}") from error
    if isinstance(cause, UserError):
        raise UserError(str(cause)) from error
    place, said = place_of(call, cause)
    if kind != Kind.OWN:
        said = describe_loss(kind, said, silent, patience_seconds)
    message = f"{place}: {said}"
    raise TrainingError(message) from RemoteTraceback(f"in {call.who}:\n{remote_traceback(error)}")


def place_of(call: Call, cause: Exception) -> tuple[str, str]:
    """Where an error was, which says so itself if that was in a phase; and what it says."""
    found = PLACE.match(str(cause))
    if found:
        group = call.who.partition("/")[0]
        return f"group {group}, {found[0]}", str(cause)[found.end() :].removeprefix(": ")
    kind = "" if isinstance(cause, TrainingError) else f"{type(cause).__name__}: "
    return call.place, f"{kind}{cause}"


def describe_loss(
    kind: Kind, said: str, silent: Sequence[Call], patience_seconds: float | None
) -> str:
    """Which processes do not answer, or were lost, and how another has noticed."""
    names, reason = ", ".join(call.who for call in silent), loss_reason(said)
    if kind == Kind.LOSS:
        return f"lost {names or 'the connection to another rank'}: {reason}"
    late = f"{names} did not answer" if names else "the ranks did not meet"
    within = "" if patience_seconds is None else f" within {patience_seconds:g} s"
    return f"{late}{within} (launch.timeout_seconds): {reason}"


def describe_death(error: Exception) -> str:
    """That a process has died, and what the cluster knows of it."""
    if "creation task" in str(error):
        return f"the process could not begin: {str(error).strip().splitlines()[-1].strip()}"
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|\n|$)", str(error))
    known = f": {detail.group(1).rstrip('.')}" if detail else ""
    return f"the process has died{known}"


def remote_traceback(error: Exception) -> str:
    """The traceback of an error in another process, without the driver's part and Ray's colours."""
    # One that Ray raises as its cause has no `traceback_str`.
    return re.sub(r"\x1b\[\d+m", "", str(error))
