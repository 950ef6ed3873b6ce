"""Run every benchmark and print its table."""

import torch
from rich.console import Console

from benchmarks import (
    checkpointing,
    collectives,
    engine,
    engine_fsdp,
    memory,
    memory_sharded,
    role_switch,
    sampling,
)

ON_ONE_RANK = (engine, role_switch, memory, sampling)
ON_TWO_RANKS = (engine_fsdp, collectives, memory_sharded, checkpointing)


def main() -> None:
    """All benchmarks, on one thread: small networks are timed more steadily that way."""
    torch.set_num_threads(1)
    console = Console()
    for benchmark in ON_ONE_RANK + ON_TWO_RANKS:
        found = benchmark.run()
        for table in found if isinstance(found, list) else [found]:
            console.print(table)


if __name__ == "__main__":
    main()
