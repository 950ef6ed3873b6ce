"""The cluster that a run uses: found or started, its places reserved, everything given back."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fewstep.errors import TERMINATED, UserError
from fewstep.launch.ray.calls import Call, gather
from fewstep.parallel.settings import LaunchSettings
from fewstep.placement import UNITS, Placement, Seat

# How long a cluster may take to say that it is there.
ANSWER_SECONDS = 5.0


@final
class Cluster:
    """A connection to Ray, and what the run has there; a context that gives all of it back.

    Everything belongs to this process: should it be killed, Ray ends the run's processes and
    frees their places by itself.
    """

    def __init__(self, launch: LaunchSettings, placement: Placement, timeout_seconds: int) -> None:
        """Say what is needed.

        Args:
            launch: where the cluster is.
            placement: the places.
            timeout_seconds: how long a process may wait for its place.
        """
        self._launch, self._placement, self._timeout = launch, placement, timeout_seconds
        self._namespace = f"fewstep-{uuid.uuid4().hex[:8]}"
        self._connected = False
        self._stack = contextlib.ExitStack()
        self._group: Any = None
        self._actors: dict[str, Any] = {}

    def __enter__(self) -> Cluster:
        try:
            self._stack.enter_context(quiet_about_what_follows())
            self._connect()
            self._reserve()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            if ray.is_initialized():
                for name in list(self._actors):
                    self.stop(name)
                if self._group is not None:
                    with contextlib.suppress(Exception):  # the cluster may be gone itself
                        remove_placement_group(self._group)
                if self._connected:
                    ray.shutdown()
            self._group = None
            self._stack.close()

    def start(
        self, kind: type, seats: Sequence[Seat], arguments: Callable[[Seat], Sequence[Any]]
    ) -> list[Any]:
        """Start a process at every seat, and wait for all of them; the handles of their actors.

        Args:
            kind: the class whose object each holds.
            seats: where.
            arguments: of the class.

        Raises:
            UserError: where one got no place in time.
        """
        actors = [self._begin(kind, seat, arguments(seat)) for seat in seats]
        ready = [actor.__ray_call__.remote(enter, os.getcwd()) for actor in actors]
        _, waiting = ray.wait(ready, num_returns=len(ready), timeout=self._timeout)
        if waiting:
            seat = seats[ready.index(waiting[0])]
            raise UserError(
                f"placement: {seat.name} got no place within {self._timeout} s "
                f"(placement.timeout_seconds): it needs {seat.units / UNITS:g} of the "
                f"{self._placement.resource!r} of bundle {seat.bundle}; {free_resources()}"
            )
        gather([Call(ref, seat.name, "start") for ref, seat in zip(ready, seats, strict=True)])
        return actors

    def _begin(self, kind: type, seat: Seat, arguments: Sequence[Any]) -> Any:
        options = resource_options(self._placement.resource, seat.share)
        actor = (
            ray.remote(kind)
            .options(
                name=seat.name,
                namespace=self._namespace,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=seat.bundle
                ),
                **{"num_cpus": 0, **options},
            )
            .remote(*arguments)
        )
        self._actors[seat.name] = actor
        return actor

    def stop(self, name: str) -> None:
        """End a process at once, if it is there."""
        actor = self._actors.pop(name, None)
        if actor is not None:
            with contextlib.suppress(Exception):  # it may be gone, and so may the cluster
                ray.kill(actor)

    def _connect(self) -> None:
        if ray.is_initialized():
            return  # the caller's own connection
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
            self._stack.callback(signal.signal, signal.SIGTERM, before)
        # Its warnings are for who runs the cluster, and would go to the user unformatted.
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            self._init()
        except SystemExit as error:
            # Ray's own handler, which it sets before it is ready, has another exit code.
            raise SystemExit(TERMINATED if error.code == signal.SIGTERM else error.code) from error
        self._connected = True
        if in_main:
            # Ray has set a handler of its own, with another exit code.
            signal.signal(signal.SIGTERM, terminate)

    def _init(self) -> None:
        address = self._launch.address
        quiet: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "namespace": self._namespace,
        }
        if address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                # They are the run itself, and not, as on a cluster, guests of others.
                _system_config={"worker_niceness": 0},
                **local_resources(self._placement.resource, self._placement.bundles),
                **quiet,
            )
        else:
            check_answers(address)
            try:
                ray.init(address=address, **quiet)
            except Exception as error:
                said = " ".join(str(error).split()) or type(error).__name__
                raise UserError(no_cluster(address, said)) from error

    def _reserve(self) -> None:
        resource, wanted = self._placement.resource, self._placement.bundles
        # A machine may hold several nodes.
        have = [
            (node["NodeManagerHostname"], math.floor(node["Resources"].get(resource, 0)))
            for node in ray.nodes()
            if node["Alive"]
        ]
        total = sum(count for _, count in have)
        if total < wanted:
            found = ", ".join(f"{name} {count}" for name, count in sorted(have))
            hint = (
                ""
                if resource in ("GPU", "CPU")
                else f". Start its nodes with `ray start --resources='{{\"{resource}\": N}}'`, or "
                f"name another resource in placement.accelerator"
            )
            raise UserError(
                f"launch.processes: {wanted} workers need one {resource!r} each, but the cluster "
                f"has {total} of them ({found}){hint}"
            )
        self._group = placement_group(
            [{resource: 1} for _ in range(wanted)], strategy="PACK", name=self._namespace
        )
        if not self._group.wait(self._timeout):
            waiting = ", ".join(s.name for s in self._placement.seats if s.kind == "trainer")
            raise UserError(
                f"placement: no place for {waiting} within {self._timeout} s "
                f"(placement.timeout_seconds): {wanted} x {resource!r} are taken by others; "
                f"{free_resources()}. Wait for them to end, or lower launch.processes"
            )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no Ctrl-C keep from giving back what others are waiting for; it takes a moment."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def quiet_about_what_follows() -> Iterator[None]:
    """Let Ray not print errors of calls that nobody has waited for.

    Once a run has failed, calls that were sent before fail as well, and only the first is told.
    """
    key = "RAY_IGNORE_UNHANDLED_ERRORS"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def terminate(*_: object) -> None:
    """End this process at once, but give back what it has on the cluster."""
    sys.exit(TERMINATED)


def check_answers(address: str) -> None:
    """Raise UserError where nobody listens: Ray itself would try again for minutes.

    Args:
        address: as the recipe says. What "auto" stands for is looked for where Ray does first; if
            there is nothing, Ray looks for processes that do run.
    """
    origin = ""
    if address == "auto":
        address, origin = automatic_address()
    host, _, port = address.rpartition(":")
    if not address:
        return
    if not host or not port.isdecimal():
        raise UserError(
            f"launch.address: {address!r} is given{origin}; it should be 'auto' or host:port"
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(no_cluster(address + origin, str(error))) from error


def automatic_address() -> tuple[str, str]:
    """The address that Ray takes for "auto", and where it is from; two empty texts if nowhere."""
    if address := os.environ.get("RAY_ADDRESS", ""):
        return address, " (of the environment variable RAY_ADDRESS)"
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder, "ray", "ray_current_cluster")
    try:
        address = file.read_text().strip()
    except OSError:
        return "", ""
    return address, f" (of {file}, where the last `ray start` has written it)" if address else ""


def no_cluster(address: str, reason: str) -> str:
    """That no cluster is where it ought to be, and what can be done."""
    return (
        f"launch.address: no Ray cluster answers at {address}: {reason.rstrip('.')}. Start one "
        f"with `ray start --head`, name another by launch.address=host:port, or set "
        f"launch.address=null to start one for this run"
    )


def enter(process: Any, directory: str) -> None:
    """Let relative paths mean in a process what they mean to the driver; called in that process.

    A node's processes begin where `ray start` was called.

    Args:
        process: the object that it holds.
        directory: of the driver.

    Raises:
        UserError: where the node has no such directory.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise UserError(
            f"launch.address: {directory}, where the run was started, cannot be entered on "
            f"{socket.gethostname()}: {error.strerror}. All nodes must see the same files"
        ) from error


def resource_options(resource: str, amount: float) -> dict[str, Any]:
    """How Ray's options name an amount of a resource."""
    if resource == "GPU":
        return {"num_gpus": amount}
    if resource == "CPU":
        return {"num_cpus": amount}
    return {"resources": {resource: amount}}


def local_resources(resource: str, amount: int) -> dict[str, Any]:
    """What a cluster of this machine alone offers: so many, where they are logical."""
    if resource == "GPU":
        return {}  # those that there are
    return resource_options(resource, amount)


def free_resources() -> str:
    """What the cluster has left, in words."""
    total, free = ray.cluster_resources(), ray.available_resources()
    names = sorted(n for n in total if not n.startswith(("node:", "memory", "object_store")))
    plain = [n for n in names if "_group_" not in n]
    return "free now: " + (
        ", ".join(f"{free.get(n, 0):g} of {total[n]:g} {n}" for n in plain) or "nothing"
    )
