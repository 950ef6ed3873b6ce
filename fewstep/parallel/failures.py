"""What ended a run of several processes: told to all by the first rank that knows."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from typing import final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fewstep.errors import TrainingError, UserError

KEY = "failure"
# How an error in a phase begins.
PLACE = re.compile(r"rank \d+, cycle \d+, phase \S+ \(role \w+\)")
# What gloo says where another process has gone, or does not answer.
LOST = re.compile(r"gloo/transport|Connection (closed|reset) by|Timed out waiting|Dist\w+Error")
TIMED_OUT = re.compile(r"Timed out|timeout", re.IGNORECASE)
# How long the others get to say that the run is broken for them as well; the machine may be busy.
ANSWER_SECONDS = 3.0


@final
@dataclass(frozen=True)
class Failure:
    """Why a run has ended.

    Attributes:
        rank: who found out first.
        message: what it said.
        code: what it exits with.
    """

    rank: int
    message: str
    code: int


@final
class Reached:
    """How far a run has got, for its errors; a hook."""

    def __init__(self) -> None:
        """Nowhere yet."""
        self.cycle: int | None = None

    def after_cycle(self, cycle: int, results: object) -> None:
        """Called once the last phase of `cycle` has finished."""
        self.cycle = cycle


@cache
def failure_store() -> Store | None:
    """Where failures are told: a connection of its own to the launcher's store, or None.

    The launcher's store outlives the processes that it has started. A store that one of them
    holds, as without torchrun, would go with it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
    except dist.DistError:
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"fewstep/{attempt}", store)


def own_rank() -> int:
    """This process's number, known before it has met the others."""
    return int(os.environ.get("RANK", "0"))


def tell_failure(message: str, code: int) -> Failure | None:
    """Tell the others why this process ends; what was told first, by whomever, or None."""
    store, mine = failure_store(), Failure(own_rank(), message, code)
    if store is None:
        return None
    try:
        return Failure(**json.loads(store.compare_set(KEY, "", json.dumps(asdict(mine)))))
    except dist.DistError:
        return mine  # the launcher has gone, and its store with it


def told_failure() -> Failure | None:
    """What was told first, by whomever; None as long as nothing was."""
    store = failure_store()
    if store is None or not store.check([KEY]):
        return None
    return Failure(**json.loads(store.get(KEY)))


def another_has_failed() -> bool:
    """Whether the run has ended already for another rank."""
    try:
        told = told_failure()
    except dist.DistError:
        return True  # the launcher has gone
    return told is not None and told.rank != own_rank()


def any_has_failed() -> bool:
    """Whether the run has ended for any rank."""
    try:
        return told_failure() is not None
    except dist.DistError:
        return True


@contextmanager
def telling_others(size: int, timeout_seconds: int, reached: Reached) -> Iterator[None]:
    """Tell the other ranks of an error, and say it with its place.

    Args:
        size: how many ranks there are; one alone raises its errors as they are.
        timeout_seconds: how long they wait for one another.
        reached: how far the run has got.

    Raises:
        UserError: a user's mistake, as it is.
        TrainingError: any other error, with rank and cycle.
    """
    try:
        yield
    except Exception as error:
        if size == 1:
            raise
        if is_loss(error):
            message, unexpected = describe_loss(error, size, timeout_seconds, reached), None
        elif isinstance(error, UserError):
            tell_failure(str(error), 2)
            raise
        else:
            message, unexpected = describe(error, reached), unexpected_cause(error)
        tell_failure(message, 1)
        raise TrainingError(message) from unexpected


def unexpected_cause(error: BaseException) -> BaseException | None:
    """The error whose traceback is worth reading: what nobody has foreseen."""
    found = error.__cause__ if isinstance(error, TrainingError) else error
    return None if isinstance(found, TrainingError | UserError) else found


def is_loss(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone, or does not answer."""
    cause = error.__cause__ or error
    return isinstance(cause, dist.DistError) or LOST.search(str(cause)) is not None


def place(error: Exception, reached: Reached) -> str:
    """Rank and cycle of an error, which says itself where it was if that was in a phase."""
    found = PLACE.match(str(error))
    after = "" if reached.cycle is None else f", after cycle {reached.cycle}"
    return found[0] if found else f"rank {own_rank()}{after}"


def describe(error: Exception, reached: Reached) -> str:
    """An error, with its place."""
    if PLACE.match(str(error)):
        return str(error)
    kind = "" if isinstance(error, TrainingError) else f"{type(error).__name__}: "
    return f"{place(error, reached)}: {kind}{error}"


def describe_loss(error: Exception, size: int, timeout_seconds: int, reached: Reached) -> str:
    """Which ranks were lost, where, and how this one, or another, has noticed."""
    own = loss_reason(str(error.__cause__ or error))
    noticed = losses(size, own)
    names = ", ".join(str(rank) for rank in range(size) if rank not in noticed)
    # The first to have waited long enough closes its connections, and the others lose it.
    late = [reason for reason in noticed.values() if TIMED_OUT.search(reason)]
    if late:
        within = f"within {timeout_seconds} s (launch.timeout_seconds)"
        found = f"rank {names}: no answer {within}" if names else f"ranks did not meet {within}"
    else:
        found = f"lost rank {names}" if names else "lost the connection to another rank"
    return f"{place(error, reached)}: {found}: {(late or [own])[0]}"


def loss_reason(said: str) -> str:
    """What torch says of a lost connection, without its place in torch's source and its advice."""
    return re.sub(r"^(\w+: )?\[\S+\] |\. This is typically.*", "", said.partition("\n")[0])


def losses(size: int, own: str) -> dict[int, str]:
    """How each rank, this one first, has noticed that the run is broken; the others are told.

    Those that do not say so have died, or hang.
    """
    store, noticed = failure_store(), {own_rank(): own}
    if store is None or another_has_failed():
        return noticed
    end = time.monotonic() + ANSWER_SECONDS
    try:
        store.set(f"broken/{own_rank()}", own)
        while len(noticed) < size and time.monotonic() < end:
            time.sleep(0.05)
            for rank in range(size):
                if rank not in noticed and store.check([f"broken/{rank}"]):
                    noticed[rank] = store.get(f"broken/{rank}").decode()
    except dist.DistError:
        pass  # the launcher has gone as well
    return noticed


def end_with_launcher() -> None:
    """Let this process be killed when the one that has started it is, where the system can."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
