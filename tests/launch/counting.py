"""Train a recipe on ranks whose global generators differ; count each one's network calls."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import torch

import fewstep
from fewstep.models.dit import DiT

calls = 0
original = DiT.forward


def forward(self: DiT, *arguments: object) -> torch.Tensor:
    """A call of the network, counted."""
    global calls
    calls += 1
    return original(self, *arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    DiT.forward = forward  # type: ignore[method-assign, assignment]
    fewstep.train(fewstep.load_recipe(sys.argv[1]))
    Path(sys.argv[2], f"calls_{rank}").write_text(str(calls))
