"""Writing and reading checkpoints on two ranks, beside plain copies of the same bytes."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from rich.table import Table

from benchmarks.memory_sharded import CHANGES, NETWORK
from benchmarks.ranks import on_ranks
from benchmarks.setup import digits_recipe
from fewstep.build import build_worker
from fewstep.checkpoint import CheckpointSettings, Saver, checkpoint_path, load_checkpoint
from fewstep.models.dit import DiTSettings
from fewstep.parallel.ranks import Ranks
from fewstep.pretrained import load_weights
from fewstep.training.cycle import CycleSettings
from fewstep.training.loop import run_cycle
from fewstep.training.worker import Worker

LAYERS = 3  # of the network of `memory_sharded`: 36 million parameters, 1.1 GiB a checkpoint
ROUNDS = 5
CHUNK = 2**24


@dataclass(frozen=True)
class Round:
    """Seconds of one round, and the checkpoint's bytes.

    Attributes:
        size: bytes.
        write: save_checkpoint, on all ranks.
        copy: plain copies of the files by one process, flushed to disk.
        read: load_checkpoint into the run, every byte checked, from files that are not cached.
        plain_read: the same files read once, not cached either.
        blocked: what the loop waits for in asynchronous saving, until training goes on and where
            the checkpoint is published.
        cycle: one cycle while nothing is written.
        cycle_meanwhile: one cycle while the checkpoint is written in the background.
    """

    size: int
    write: float
    copy: float
    read: float
    plain_read: float
    blocked: float
    cycle: float
    cycle_meanwhile: float


def build(ranks: Ranks) -> Worker:
    """A worker whose optimizers have their moments."""
    changes = [c for c in CHANGES if not c.startswith("lora")]
    recipe = digits_recipe("independent", changes=[*changes, "parallel.kind=fsdp2"])
    network = NETWORK.model_copy(update={"num_layers": LAYERS})
    recipe = recipe.model_copy(update={"model": DiTSettings(network=network)})
    model = recipe.model.build()
    worker = build_worker(recipe, model, None, load_weights(recipe, model), ranks)
    cycle(worker)
    return worker


def cycle(worker: Worker) -> None:
    """The first cycle, over and over: always the same work."""
    run_cycle(worker, 1, worker.method.fake_updates_per_student, CycleSettings())


def timed(ranks: Ranks, function: Callable[[], object]) -> float:
    """Seconds from when all ranks begin until all have ended."""
    ranks.barrier()
    began = time.perf_counter()
    function()
    ranks.barrier()
    return time.perf_counter() - began


def copy_flushed(source: Path, target: Path) -> None:
    """Copy a directory as `cp` does, and flush every file to disk."""
    shutil.copytree(source, target)
    for file in (f for f in target.rglob("*") if f.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(directory: Path) -> None:
    """Drop the files of a directory from the system's cache."""
    for file in (f for f in directory.rglob("*") if f.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(directory: Path) -> None:
    """Read every file once."""
    for file in (f for f in directory.rglob("*") if f.is_file()):
        with file.open("rb", buffering=0) as opened:
            while opened.read(CHUNK):
                pass


def save_behind(worker: Worker, saver: Saver, directory: Path) -> tuple[float, float]:
    """Save in the background: seconds that the loop is blocked, and of a cycle meanwhile."""
    blocked = timed(worker.ranks, lambda: saver.save(2, worker.state_dict(), {}))
    cycles = []
    while True:
        cycles.append(timed(worker.ranks, lambda: cycle(worker)))
        polled = timed(worker.ranks, saver.poll)
        if worker.ranks.any(checkpoint_path(directory, 2).exists()):
            return blocked + polled, statistics.median(cycles)


def measure(ranks: Ranks, folder: str) -> list[Round]:
    """The rounds; the first, which warms up, is left out."""
    worker = build(ranks)
    found = []
    for number in range(ROUNDS + 1):
        directory = Path(folder) / f"round{number}"
        at_once = Saver(directory, CheckpointSettings(), ranks)
        behind = Saver(directory, CheckpointSettings(asynchronous=True), ranks)
        first, copied = checkpoint_path(directory, 1), directory / "copy"

        def on_first_rank(step: Callable[[], object]) -> float:
            return timed(ranks, lambda: step() if ranks.first else None)

        def read(checkpoint: Path = first) -> None:
            state = load_checkpoint(checkpoint, worker.empty_state, ranks)
            worker.load_state_dict(state)

        write = timed(ranks, lambda at=at_once: at.save(1, worker.state_dict(), {}))
        copy = on_first_rank(lambda a=first, b=copied: copy_flushed(a, b))
        size = sum(f.stat().st_size for f in first.rglob("*") if f.is_file())
        on_first_rank(lambda a=first: forget(a))
        reading = timed(ranks, read)
        on_first_rank(lambda b=copied: forget(b))
        plain = on_first_rank(lambda b=copied: read_all(b))
        alone = timed(ranks, lambda: cycle(worker))
        blocked, meanwhile = save_behind(worker, behind, directory)
        behind.close()
        found.append(Round(size, write, copy, reading, plain, blocked, alone, meanwhile))
        on_first_rank(lambda d=directory: shutil.rmtree(d))
    return found[1:]


def run() -> Table:
    """The table: medians, and medians of ratios within a round."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        rounds = on_ranks(measure, folder)[0]
    values = {f.name: [getattr(r, f.name) for r in rounds] for f in fields(Round)}
    table = Table(title=f"A checkpoint of {values['size'][0] / 2**20:.0f} MiB, 2 ranks, FSDP2")
    for name in ("", "seconds", "beside", "seconds", "ratio"):
        table.add_column(name, justify="right" if name in ("seconds", "ratio") else "left")
    for title, ours, beside, theirs in (
        ("write, flushed, with SHA-256", "write", "cp and fsync", "copy"),
        ("check SHA-256 and read", "read", "plain read", "plain_read"),
        ("blocked, asynchronous", "blocked", "blocked, synchronous", "write"),
        ("a cycle while writing", "cycle_meanwhile", "a cycle alone", "cycle"),
    ):
        ratio = statistics.median(a / b for a, b in zip(values[ours], values[theirs], strict=True))
        a, b = statistics.median(values[ours]), statistics.median(values[theirs])
        table.add_row(title, f"{a:.2f}", beside, f"{b:.2f}", f"{ratio:.2f}")
    return table
