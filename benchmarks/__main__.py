"""Run benchmarks and print their tables: all, or those whose names are given.

`python -m benchmarks engine sampling` runs two of them, `python -m benchmarks ray` those on Ray.
"""

import importlib
import sys

import torch
from rich.console import Console

PARTS = {
    "one_rank": ("engine", "role_switch", "memory", "sampling"),
    "two_ranks": ("engine_fsdp", "collectives", "memory_sharded", "checkpointing"),
    "ray": ("ray_overhead", "ray_groups", "ray_push", "ray_offload"),
}


def main(names: list[str]) -> None:
    """Benchmarks, or parts of them, on one thread: small networks are timed more steadily so."""
    torch.set_num_threads(1)
    console = Console()
    for name in names or PARTS:
        for benchmark in PARTS.get(name, (name,)):
            found = importlib.import_module(f"benchmarks.{benchmark}").run()
            for table in found if isinstance(found, list) else [found]:
                console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
