"""Checkpoints of a run whose roles are spread over groups: written by each, published here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import ray
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fewstep.checkpoint import (
    discard_draft,
    divide,
    merge_states,
    open_draft,
    prune_checkpoints,
    publish_draft,
    write_best,
)
from fewstep.config import Recipe
from fewstep.errors import TrainingError, UserError
from fewstep.files import FileEntry
from fewstep.launch.hooks import run_documents
from fewstep.launch.ray.executor import GroupExecutor
from fewstep.launch.ray.external import ExternalData
from fewstep.launch.ray.group import TrainerGroup
from fewstep.launch.ray.pool import Ordered
from fewstep.parallel.ranks import share
from fewstep.training.metrics import logger

AHEAD = "rollouts.safetensors"
VERSIONS = "versions"


@final
@dataclass
class _Flight:
    """A checkpoint that the groups are writing."""

    cycle: int
    draft: Path
    state: Mapping[str, Any]
    documents: Mapping[str, str | bytes]
    best: Mapping[str, Any] | None = None


@final
class GroupSaves:
    """Saves all groups of a run at once."""

    def __init__(
        self, recipe: Recipe, executor: GroupExecutor, fingerprint: Mapping[str, Any]
    ) -> None:
        """Prepare to save.

        Args:
            recipe: resolved.
            executor: knows the groups, and wakes them.
            fingerprint: of the run.
        """
        self._directory, self._keep = Path(recipe.run_dir), recipe.checkpoint.keep
        self._behind = recipe.checkpoint.asynchronous
        self._executor = executor
        self._flight: _Flight | None = None
        self._documents = run_documents(recipe, fingerprint)
        groups = executor.groups
        tensors = {name: group.report.tensors for name, group in groups.items()}
        written = divide(tensors)
        self._skipped = {n: sorted(set(tensors[n]) - set(written[n])) for n in groups}

    def save(self, cycle: int) -> None:
        """See `Saves.save`."""
        self.finish()
        groups = self._executor.groups
        parts = {name: name if len(groups) > 1 else "" for name in groups}
        draft = open_draft(self._directory, cycle, list(parts.values()))
        states: dict[str, Any] = {}
        try:
            documents: dict[str, str | bytes] = dict(self._documents)
            if ahead := self._executor.ahead():
                documents[AHEAD] = pack_ahead(ahead)
            for group in self._order():
                self._executor.wake(group)
                skipped = self._skipped[group.name]
                states[group.name] = group.write(
                    draft, parts[group.name], skipped, cycle, self._behind
                )
        except BaseException:
            discard_draft(draft)
            raise
        merged = merge_states([states[name] for name in groups])
        self._flight = _Flight(cycle, draft, merged, documents)
        if not self._behind:
            self.finish()

    def name_best(self, best: Mapping[str, Any]) -> None:
        """See `Saves.name_best`."""
        if self._flight is not None and self._flight.cycle == best["cycle"]:
            self._flight.best = best
            return
        write_best(self._directory, best)
        prune_checkpoints(self._directory, self._keep)

    def poll(self) -> None:
        """See `Saves.poll`."""
        if self._flight is not None and all(
            group.is_written() for group in self._executor.groups.values()
        ):
            self.finish()

    def finish(self) -> None:
        """See `Saves.finish`."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        files: dict[str, FileEntry] = {}
        try:
            for group in self._executor.groups.values():
                files.update(group.written())
        except BaseException:
            discard_draft(flight.draft)
            raise
        publish_draft(flight.draft, flight.state, files, flight.documents)
        if flight.best is not None:
            write_best(self._directory, flight.best)
        prune_checkpoints(self._directory, self._keep)

    def close(self) -> None:
        """See `Saves.close`: the background ends with its processes.

        Where the run has failed, what is on its way is published if all ranks can still finish it.
        """
        try:
            self.finish()
        except (TrainingError, UserError) as error:
            logger.warning("a checkpoint that was being written is lost: %s", error)

    def _order(self) -> list[TrainerGroup]:
        """Those on the accelerators first, and last the one that the next cycle begins with.

        So none has to be woken for saving and once more for the next cycle.
        """
        backwards = list(self._executor.groups.values())[::-1]
        return sorted(backwards, key=lambda group: not group.awake)


def pack_ahead(ahead: list[Ordered]) -> bytes:
    """Samples of the next cycle, as the content of a file; whole, whatever the trainers' ranks."""
    tensors = {}
    for ordered in ahead:
        parts: list[ExternalData] = ray.get(ordered.data)
        key = f"{ordered.cycle}/{ordered.name}"
        tensors[f"{key}:{VERSIONS}"] = torch.cat([part.versions for part in parts])
        for name in parts[0].tensors:
            tensors[f"{key}:{name}"] = torch.cat([part.tensors[name] for part in parts])
    return save(tensors)


def unpack_ahead(checkpoint: Path, size: int) -> list[Ordered]:
    """The samples that a checkpoint holds for the next cycle, for trainers of `size` ranks.

    Raises:
        UserError: where the file is damaged.
    """
    file = checkpoint / AHEAD
    if not file.exists():
        return []
    try:
        tensors = load(file.read_bytes())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    by_order: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        key, _, name = path.rpartition(":")
        by_order.setdefault(key, {})[name] = tensor
    return [_unpack(key, whole, size) for key, whole in by_order.items()]


def _unpack(key: str, whole: dict[str, torch.Tensor], size: int) -> Ordered:
    cycle, _, rollout = key.partition("/")
    versions = whole.pop(VERSIONS)
    ordered = Ordered(int(cycle), rollout, [])
    for rank in range(size):
        mine = share(len(versions), size, rank)
        rows = slice(mine.start, mine.stop)
        part = {name: tensor[rows].clone() for name, tensor in whole.items()}
        ids = torch.arange(mine.start, mine.stop)
        data = ExternalData(int(cycle), rollout, rank, versions[rows].clone(), ids, part)
        ordered.data.append(ray.put(data))
        ordered.versions.append(data.versions)
    return ordered
