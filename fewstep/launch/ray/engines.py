"""The engine of a rollout worker, as a recipe asks for it."""

from __future__ import annotations

from pathlib import Path

import torch

from fewstep.build import build_worker
from fewstep.checkpoint import load_network
from fewstep.config import Recipe
from fewstep.models.model import Model
from fewstep.parallel.ranks import Ranks
from fewstep.pipeline_engine import build_engine
from fewstep.pretrained import load_weights
from fewstep.roles.role import STUDENT, TEACHER_SCORE
from fewstep.rollout import RolloutEngine
from fewstep.run import for_one_process
from fewstep.weights import Confirmation, canonical_names, confirm


def open_engine(
    recipe: Recipe, model: Model, checkpoint: Path | None
) -> tuple[RolloutEngine, Confirmation | None]:
    """An engine with the frozen base where there is one; the student itself is sent to it.

    Args:
        recipe: resolved.
        model: the adapter.
        checkpoint: of a run that is gone on with, which holds the base.

    Returns:
        The engine, and the base by its checksum; None where there is none.
    """
    runtime = recipe.runtime.model_copy(update={"activation_checkpointing": False})
    alone = for_one_process(recipe).model_copy(update={"runtime": runtime})
    ranks = Ranks(0, 1, torch.device(recipe.runtime.device), grouped=False)
    on_base, base = recipe.storage == "shared_base", None
    teacher = load_weights(alone, model) if on_base and checkpoint is None else None
    worker = build_worker(alone, model, None, teacher, ranks, (STUDENT,))
    if on_base and checkpoint is not None:
        storage = worker.roles.storage
        name = storage.network_of(STUDENT)
        load_network(checkpoint, name, storage.tensors[name], partial=True)
    if on_base:
        storage = worker.roles.storage
        base = confirm(storage.module(STUDENT), canonical_names(storage, TEACHER_SCORE), version=0)
    return build_engine(recipe, worker), base
