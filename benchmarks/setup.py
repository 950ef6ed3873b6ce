"""What the benchmarks share: the digits' network with random weights, and timing in turns."""

import statistics
import time
from collections.abc import Callable

import fewstep
from fewstep.run import build_worker, load_weights
from fewstep.training.worker import Worker

NETWORKS = {
    "demo": [],
    # 0.4M parameters, 16 tokens: still tiny, but a forward pass weighs something.
    "4 layers, patch 2": [
        "model.network.num_layers=4",
        "model.network.attention_head_dim=16",
        "model.network.patch_size=2",
    ],
}


def digits_worker(storage: str, network: str = "demo") -> Worker:
    """A DMD2 worker as the digits' student recipe makes it, over an untrained teacher."""
    file = (
        "recipes/digits/student.yaml"
        if storage == "independent"
        else "recipes/digits/student_shared.yaml"
    )
    teacher = fewstep.load_recipe("recipes/digits/teacher.yaml", NETWORKS[network])
    recipe = fewstep.load_recipe(
        file,
        ["train.cycles=10000"],
    )
    recipe = recipe.model_copy(update={"model": teacher.model})
    model = recipe.model.build()
    return build_worker(recipe, model, None, load_weights(recipe, model))


def alternate(
    first: Callable[[], None], second: Callable[[], None], rounds: int
) -> tuple[float, float, float]:
    """Time two things in turns: median seconds of each, and the median ratio first / second.

    The order changes every round, so that a drift of the machine's speed hits both alike.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(rounds + 1):
        order = ((0, first), (1, second)) if round_number % 2 else ((1, second), (0, first))
        for index, function in order:
            began = time.perf_counter()
            function()
            if round_number > 0:  # the first round warms up
                times[index].append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(ratios)
