"""Run every benchmark and print its table."""

import torch
from rich.console import Console

from benchmarks import engine, memory, role_switch, sampling


def main() -> None:
    """All benchmarks, on one thread: small networks are timed more steadily that way."""
    torch.set_num_threads(1)
    console = Console()
    for benchmark in (engine, role_switch, memory, sampling):
        console.print(benchmark.run())


if __name__ == "__main__":
    main()
