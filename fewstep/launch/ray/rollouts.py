"""Rollout workers: processes with a copy of the student that make samples for the phases."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fewstep.build import build_batches
from fewstep.config import Recipe
from fewstep.data.batches import Batch
from fewstep.data.conditions import Conditions, conditions_in_turn
from fewstep.data.items import Items
from fewstep.diffusion.draw import Draw
from fewstep.launch.local import load_data
from fewstep.launch.ray.engines import open_engine
from fewstep.launch.ray.external import ExternalData
from fewstep.launch.ray.transport import Portion, unpack
from fewstep.launch.ray.underway import Reply
from fewstep.models.model import Model
from fewstep.parallel.ranks import CPU, Ranks
from fewstep.run import prompts_to_sample
from fewstep.sampling import rollout_of_samples, samples_at_once
from fewstep.training.reduction import micro_batches
from fewstep.training.timeline import Span, timed
from fewstep.validation import ValidationSettings
from fewstep.weights import Confirmation


@final
class RolloutProcess:
    """One rollout worker: an engine, and the draws that say what it makes."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        """Begin.

        Args:
            rank: its number among the rollout workers.
            recipe: resolved.
        """
        self._lane, self._recipe = f"rollout/{rank}", recipe
        self._version = -1
        self._taken: list[Span] = []
        logging.getLogger("fewstep").setLevel(logging.ERROR)
        torch.set_num_threads(recipe.runtime.threads or torch.get_num_threads())

    def set_up(self, model: Model | None, dataset: Items | None, checkpoint: Path | None) -> None:
        """Build the engine.

        Args:
            model: the adapter of a network of the caller's.
            dataset: of the caller's.
            checkpoint: of a run that is gone on with: it holds what the student rests on.
        """
        recipe = self._recipe
        self._model = model or recipe.model.build()
        self._method = recipe.method.build()
        self._dtype = recipe.runtime.torch_dtype
        self._engine, self._base = open_engine(recipe, self._model, checkpoint)
        data = load_data(recipe, dataset)
        self._items = prompts_to_sample(recipe, self._model, dataset)
        device = torch.device(recipe.runtime.device)
        self._batches = build_batches(recipe, self._model, data, device, self._dtype)

    def base(self) -> Confirmation | None:
        """The frozen base that the student rests on, by its checksum; None where there is none."""
        return self._base

    def generate(self, cycle: int, name: str, rank: int, size: int) -> tuple[Reply, ExternalData]:
        """Student samples of a phase, for one rank of the trainers.

        Made in the same portions in which the trainer would make them itself.

        Args:
            cycle: of the phase.
            name: the phase whose samples they are.
            rank: of the trainers' group.
            size: of that group.
        """
        spans: list[Span] = []
        with timed(spans.append, f"rollout {name}", self._lane, "rollout", cycle):
            ranks, total = Ranks(rank, size, CPU, grouped=True), self._recipe.train.batch_size
            draw, mine = Draw(self._recipe.seed, cycle, name), ranks.share(total)
            batch = self._batches.batch(draw, total, mine)
            parts = micro_batches(total, ranks, self._recipe.train.micro_batch_size)
            x0 = [
                self._make(batch.rows(p.rows.start - mine.start, p.rows.stop - mine.start), draw)
                for p in parts
                if p.count
            ]
        ids, tensors = batch.sample_ids.cpu(), {"x0": torch.cat(x0)}
        versions = torch.full_like(ids, self._version)
        found = ExternalData(cycle, name, rank, versions, ids, tensors)
        return Reply(versions, tuple(spans)), found

    def _make(self, batch: Batch, draw: Draw) -> Tensor:
        rollout = self._method.rollout(self._model, batch, draw, self._dtype)
        return self._engine.generate(rollout).cpu()

    def sample(self, settings: ValidationSettings, mine: range) -> Tensor:
        """Images of the samples with these numbers, of those that validation wants."""
        conditions = conditions_in_turn(self._model.classes, self._items, settings.samples)
        at_once = settings.batch_size or samples_at_once(self._model)
        parts = torch.split(torch.arange(mine.start, mine.stop), at_once)
        return torch.cat([self._images(settings, conditions, ids) for ids in parts])

    def _images(self, settings: ValidationSettings, conditions: Conditions, ids: Tensor) -> Tensor:
        rollout = rollout_of_samples(
            self._model,
            self._method.sampler(),
            ids.to(self._recipe.runtime.device),
            conditions.of(ids),
            settings.seed,
            self._dtype,
        )
        return self._model.decode(self._engine.generate(rollout)).float().cpu()

    def load_weights(self, portion: Portion, cycle: int) -> None:
        """Take a portion of the student's weights."""
        with timed(self._taken.append, "load", self._lane, "push", cycle):
            self._engine.load_weights(unpack(portion.tensors))
            self._version = portion.version

    def confirm(self, cycle: int) -> Reply:
        """Say what the engine holds now, all portions taken; with the spans of all."""
        spans, self._taken = self._taken, []
        with timed(spans.append, "confirm", self._lane, "push", cycle):
            held = self._engine.bound(self._version)
        return Reply(held, tuple(spans))

    def sleep(self, cycle: int) -> Reply:
        """Give the accelerator's memory back."""
        return self._move("sleep", self._engine.sleep, cycle)

    def wake(self, cycle: int) -> Reply:
        """Take it again."""
        return self._move("wake", self._engine.wake, cycle)

    def _move(self, name: str, move: Callable[[], None], cycle: int) -> Reply:
        spans: list[Span] = []
        with timed(spans.append, name, self._lane, "offload", cycle):
            move()
        return Reply(None, tuple(spans))
