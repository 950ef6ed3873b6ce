"""Starts a function on several ranks of this machine, over gloo."""

import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from fewstep.parallel.ranks import CPU, Ranks, join, leave

# What takes seconds to import. The processes are forked from one that has done so once.
PRELOAD = [
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "peft"),
    "diffusers.models.transformers.dit_transformer_2d",
    "fewstep.launch.local",
]


def on_ranks(function: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
    """Call `function(ranks, *args)` in `size` new processes; what each of them returns.

    Args:
        function: of a module, so that another process can import it.
        args: its arguments after the ranks.
        size: how many processes, each with one thread.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(PRELOAD)
        arguments = (size, folder, function, args)
        start_processes(_on_rank, arguments, nprocs=size, start_method="forkserver")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]


def _on_rank(
    rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # They meet through a file: no port can be taken by somebody else.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),
    )
    ranks: Ranks = join(CPU, timeout_seconds=300)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(ranks, *args)))
    leave()
    # Not through the interpreter's end: gloo's and autograd's threads may abort the process there.
    sys.stdout.flush()
    os._exit(0)
