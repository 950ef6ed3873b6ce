"""What the benchmarks share: the digits' network with random weights, and timing in turns."""

import statistics
import time
from collections.abc import Callable, Sequence

import fewstep
from fewstep.build import build_worker
from fewstep.config import Recipe
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.pretrained import load_weights
from fewstep.training.worker import Worker

STORAGES = ("independent", "shared_base")
NETWORKS = {
    "demo": [],
    # 0.4M parameters, 16 tokens: still tiny, but a forward pass weighs something.
    "4 layers, patch 2": [
        "model.network.num_layers=4",
        "model.network.attention_head_dim=16",
        "model.network.patch_size=2",
    ],
}


def digits_recipe(storage: str, network: str = "demo", changes: Sequence[str] = ()) -> Recipe:
    """The digits' student recipe with a new network of its teacher's kind.

    Args:
        storage: "independent" or "shared_base".
        network: one of `NETWORKS`.
        changes: `key=value` overrides.
    """
    file = {"independent": "student", "shared_base": "student_shared"}[storage]
    teacher = fewstep.load_recipe("recipes/digits/teacher.yaml", NETWORKS[network])
    recipe = fewstep.load_recipe(f"recipes/digits/{file}.yaml", ["train.cycles=10000", *changes])
    return recipe.model_copy(update={"model": teacher.model})


def digits_worker(
    storage: str, network: str = "demo", changes: Sequence[str] = (), ranks: Ranks = SINGLE
) -> Worker:
    """A DMD2 worker of `digits_recipe`, over an untrained teacher."""
    recipe = digits_recipe(storage, network, changes)
    model = recipe.model.build()
    return build_worker(recipe, model, None, load_weights(recipe, model), ranks)


def alternate(
    first: Callable[[], None], second: Callable[[], None], rounds: int
) -> tuple[float, float, float]:
    """Time two things in turns: median seconds of each, and the median ratio first / second."""
    return alternate_by((time.perf_counter,), first, second, rounds)[0]


def alternate_by(
    clocks: Sequence[Callable[[], float]],
    first: Callable[[], None],
    second: Callable[[], None],
    rounds: int,
) -> list[tuple[float, float, float]]:
    """What `alternate` gives, by several clocks at once.

    The order changes every round, so that a drift of the machine's speed hits both alike.
    """
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in clocks]
    for round_number in range(rounds + 1):
        order = ((0, first), (1, second)) if round_number % 2 else ((1, second), (0, first))
        for index, function in order:
            began = [clock() for clock in clocks]
            function()
            if round_number > 0:  # the first round warms up
                for pair, clock, start in zip(times, clocks, began, strict=True):
                    pair[index].append(clock() - start)
    found = []
    for one, other in times:
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        found.append((statistics.median(one), statistics.median(other), statistics.median(ratios)))
    return found
