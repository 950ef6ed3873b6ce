"""Saving while a run goes on: at once, or in the background while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar, final

import torch
import torch.distributed as dist
from pydantic import Field

from fewstep.checkpoint.directory import prune_checkpoints, write_best
from fewstep.checkpoint.draft import Documents, Files
from fewstep.checkpoint.peers import Peers
from fewstep.checkpoint.save import Draft, begin, publish, write
from fewstep.errors import TrainingError
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.settings import Settings

T = TypeVar("T")

# How long a run that has failed waits for what it is still writing.
LAST_SECONDS = 10.0


@final
class CheckpointSettings(Settings):
    """When run state is saved, and how much of it is kept."""

    every: Annotated[int, Field(gt=0)] = Field(
        100, description="cycles between checkpoints; the last cycle is always saved"
    )
    keep: Annotated[int, Field(ge=1)] = Field(
        2, description="newest checkpoints that are kept, besides the best one"
    )
    asynchronous: bool = Field(
        False,
        description="write in the background while training goes on; needs main memory for a "
        "copy of what is saved",
    )


@final
@dataclass
class _Flight:
    """A checkpoint that is being written in the background."""

    cycle: int
    draft: Draft
    files: Future[Files]
    best: Mapping[str, Any] | None = None


@final
class Saver:
    """Saves the state of a run, names the best, and prunes; every rank has one.

    In the background, a checkpoint is written from a copy of the state. It is published at the
    first `poll` after all ranks have written their parts, by all ranks at the same one.
    """

    def __init__(
        self,
        run_directory: Path,
        settings: CheckpointSettings,
        ranks: Ranks = SINGLE,
        timeout_seconds: float = 600,
    ) -> None:
        """Prepare to save.

        Args:
            run_directory: the same for all ranks.
            settings: whether in the background, and how many are kept.
            ranks: of the run.
            timeout_seconds: how long a rank waits in the background for the others to write.
        """
        self._directory = run_directory
        self._settings = settings
        self._peers = Peers(ranks)
        self._behind = Background(ranks, timeout_seconds)
        self._flight: _Flight | None = None

    def save(self, cycle: int, state: Mapping[str, Any], documents: Documents) -> None:
        """Save the state after `cycle`, as `save_checkpoint` does; may return before it is done.

        Raises:
            UserError: where this one, or the one before it, cannot be written.
        """
        self.finish()
        copies = self._settings.asynchronous
        draft = begin(self._directory, cycle, state, documents, self._peers, copies)
        if not copies:
            publish(draft, write(draft, self._peers), self._peers)
            self._prune()
            return
        files = self._behind.submit(lambda peers: _write_behind(draft, peers))
        self._flight = _Flight(cycle, draft, files)

    def name_best(self, best: Mapping[str, Any]) -> None:
        """Write best.json, once the checkpoint that it names is published."""
        if self._flight is not None and self._flight.cycle == best["cycle"]:
            self._flight.best = best
            return
        self._peers.first(lambda: write_best(self._directory, best))
        self._prune()

    def poll(self) -> None:
        """Publish what all ranks have finished writing; called by all after each cycle.

        Raises:
            UserError: where it could not be written; nothing older is lost.
        """
        if self._flight is not None and all(self._peers.gather(self._flight.files.done())):
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written, and publish it.

        Raises:
            UserError: where it could not be written; nothing older is lost.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        publish(flight.draft, self._written(flight), self._peers)
        if flight.best is not None:
            best = flight.best
            self._peers.first(lambda: write_best(self._directory, best))
        self._prune()

    def close(self) -> None:
        """Let the background end. Without `finish` before, what it writes is not published."""
        flight, self._flight = self._flight, None
        if flight is not None:
            # Not for ever: it may wait for another rank, which is what has failed.
            wait([flight.files], LAST_SECONDS)
        self._behind.close(wait=flight is None)

    def _written(self, flight: _Flight) -> Files:
        """All files, once all ranks are done; what failed on any is an error on all."""
        wait([flight.files])
        error = flight.files.exception()
        reasons = self._peers.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for reason in reasons:
            if reason is not None:
                raise TrainingError(reason)
        return flight.files.result()

    def _prune(self) -> None:
        self._peers.first(lambda: prune_checkpoints(self._directory, self._settings.keep))


def _write_behind(draft: Draft, peers: Peers) -> Files:
    try:
        return write(draft, peers)
    finally:
        draft.tensors = {}  # the copies


@final
class Background:
    """A thread that works with those of the other ranks, apart from the run's own collectives."""

    def __init__(self, ranks: Ranks, timeout_seconds: float) -> None:
        """Nothing is started yet.

        Args:
            ranks: each of them has one of these.
            timeout_seconds: how long a thread waits for the others.
        """
        self._ranks, self._timeout = ranks, timedelta(seconds=timeout_seconds)
        self._started: tuple[Peers, ThreadPoolExecutor] | None = None

    def submit(self, work: Callable[[Peers], T]) -> Future[T]:
        """Let the thread do something; called by all ranks alike, from their main threads."""
        if self._started is None:
            group = None
            if self._ranks.size > 1:
                group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._started = Peers(self._ranks, group), ThreadPoolExecutor(1, "checkpoint")
        peers, thread = self._started
        return thread.submit(self._work, work, peers)

    def _work(self, work: Callable[[Peers], T], peers: Peers) -> T:
        if self._ranks.device.type == "cuda":
            # A new thread begins on the first device, whatever this rank's is.
            torch.cuda.set_device(self._ranks.device)
        return work(peers)

    def close(self, wait: bool) -> None:
        """End the thread; `wait`: once it has done what it is at."""
        if self._started is not None:
            self._started[1].shutdown(wait=wait)
