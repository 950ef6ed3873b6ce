"""Start the processes of a run on this machine, as torchrun does, and end them together."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fewstep.build import check_ranks
from fewstep.config import Recipe
from fewstep.errors import INTERRUPTED, TERMINATED, UserError
from fewstep.launch.directory import Resume, check_directory, is_resumed
from fewstep.launch.lock import RunLock
from fewstep.parallel.failures import own_rank
from fewstep.parallel.ranks import CPU, Ranks

# Where rank 0 writes its exit code: the launcher says nothing of it where it was stopped itself.
EXIT_CODE = "FEWSTEP_EXIT_CODE_FILE"
# Heartbeats tell the launchers of other machines that this one lives, and there are none. One that
# is under way while the launcher is stopped ends by an error of its thread on standard error.
HEARTBEAT_SECONDS = 365 * 24 * 3600


@final
@dataclass(frozen=True)
class Ended:
    """How the processes of a run have ended.

    Attributes:
        code: what the launching process exits with.
        killed: sentences about ranks that were killed, and could not say anything themselves.
    """

    code: int
    killed: tuple[str, ...] = ()


def check_launch(recipe: Recipe, resume: Resume) -> None:
    """Raise UserError for what can be known to be wrong before any process is started."""
    check_devices(recipe)
    check_ranks(recipe, Ranks(0, recipe.launch.processes, CPU, grouped=True))
    directory = Path(recipe.run_dir)
    RunLock(directory).check()
    check_directory(directory, is_resumed(directory, resume))


def check_devices(recipe: Recipe) -> None:
    """Raise UserError where the processes of a recipe would not have a device each."""
    wanted, device = recipe.launch.processes, recipe.runtime.device
    if device.startswith("cuda"):
        found = torch.cuda.device_count()
        if ":" in device:
            raise UserError(
                f"runtime.device: {device!r} names one device, but launch.processes is {wanted}; "
                f"write 'cuda', and each takes its own"
            )
        if wanted > found:
            raise UserError(
                f"launch.processes: {wanted} is given, one for each CUDA device, but there are "
                f"{found}; lower it, or use runtime.device=cpu"
            )


def launch(arguments: Sequence[str], processes: int, grace_seconds: int) -> Ended:
    """Run `python <arguments>` in so many processes until all have ended.

    Args:
        arguments: of Python: a script, or `-m` and a module, with theirs.
        processes: how many.
        grace_seconds: how long they may take to end once this process was told to stop.
    """
    # A Ctrl-C reaches this process alone, which passes it on: the others are sessions of their
    # own. So is a closed terminal, unless nohup has said that it does not matter.
    signals = ["SIGTERM", "SIGINT", "SIGQUIT"]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append("SIGHUP")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"keep_alive_interval": HEARTBEAT_SECONDS},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=",".join(signals),
        shutdown_timeout=grace_seconds,
    )
    with tempfile.TemporaryDirectory() as folder, launching(Path(folder) / "exit_code") as file:
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            return ended_by_failure(error.failures)
        except SignalException as error:
            return ended_by_signal(error.sigval, file, grace_seconds)
    return Ended(0)


@contextmanager
def launching(file: Path) -> Iterator[Path]:
    """Silence torch's launcher, whose users read our errors, and take its signal handlers back."""
    kept = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)}
    kept[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
    environment = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[EXIT_CODE] = str(file)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield file
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in kept.items():
            signal.signal(number, handler)


def ended_by_failure(failures: dict[int, ProcessFailure]) -> Ended:
    """The exit code of processes of which some have not ended well; rank -> how."""
    codes = {failure.exitcode for failure in failures.values()}
    first = min(failure.timestamp for failure in failures.values())
    # The launcher ends the others by SIGTERM, and half a minute later by SIGKILL.
    killed = {
        rank: signal.Signals(-failure.exitcode).name
        for rank, failure in sorted(failures.items())
        if failure.exitcode < 0
        and failure.exitcode != -signal.SIGTERM
        and failure.timestamp <= first + 2
    }
    sentences = tuple(f"rank {rank} was killed by {name}" for rank, name in killed.items())
    if 2 in codes:
        return Ended(2, sentences)
    if killed or not codes <= {TERMINATED, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT}:
        return Ended(1, sentences)
    return Ended(TERMINATED if codes & {TERMINATED, -signal.SIGTERM} else INTERRUPTED)


def ended_by_signal(number: signal.Signals, file: Path, grace_seconds: int) -> Ended:
    """The exit code of processes that were told to stop: what rank 0 has said, if it could."""
    if file.exists():
        return Ended(int(file.read_text()))
    return Ended(
        128 + number,
        (
            f"the processes were ended by {number.name} before they could save, or took more than "
            f"{grace_seconds} s (launch.grace_seconds) for it; what was saved before is untouched",
        ),
    )


def note_exit_code(code: int) -> None:
    """Let the process that has started this one know how the run has ended."""
    if EXIT_CODE in os.environ and own_rank() == 0:
        Path(os.environ[EXIT_CODE]).write_text(str(code))


def end_rank(code: int) -> NoReturn:
    """End a process that shares a run which has failed, without waiting for anything.

    What winds a process group up on an orderly exit may wait for ranks that have gone.
    """
    note_exit_code(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
