"""Encoded prompts and images on disk: shards that are mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fewstep.data.dataset import Split
from fewstep.data.items import Items, Texts
from fewstep.data.manifest import MANIFEST, UNCONDITIONAL, check_file, read_own
from fewstep.errors import UserError

CONDITION, ROWS, SAMPLES = "condition/", "prompt", "x0"
"""Names in a shard: conditions of its prompts, each item's prompt, and its sample."""
METADATA = "items"
AGAIN = "make it again with `fewstep encode`"


@final
class EncodedItems(Items):
    """One split of an encoded data set.

    Shards are opened when they are needed, by each process for itself; nothing but the place
    travels to another process.
    """

    def __init__(self, directory: Path, split: Split = "train") -> None:
        """Open it.

        Args:
            directory: what `fewstep encode` has written.
            split: which part.

        Raises:
            UserError: where it is not complete, or a shard is missing or of another size.
        """
        self.directory, self.split = directory, split
        self.manifest = read_manifest(directory)
        if split not in self.manifest["splits"]:
            raise UserError(f"{directory} holds no {split} data")
        self._names: list[str] = self.manifest["splits"][split]
        entries = [self.manifest["files"][name] for name in self._names]
        for name in (*self._names, UNCONDITIONAL):
            problem = check_file(directory / name, self.manifest["files"][name])
            if problem is not None:
                raise UserError(f"{problem}; {AGAIN}")
        self._ends = torch.tensor([entry["items"] for entry in entries]).cumsum(0)
        self._open: dict[int, dict[str, Tensor]] = {}
        self._texts: dict[int, list[str]] = {}
        self.has_samples = self.manifest["x0"] is not None
        self.prompts = Texts(len(self), self.text)
        self.unconditional = self._load_unconditional()

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedItems, (self.directory, self.split)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def sha256(self) -> str:
        """Of this split's shards and the condition that stands for none."""
        files = [self.manifest["files"][n]["sha256"] for n in (*self._names, UNCONDITIONAL)]
        return hashlib.sha256("\n".join(files).encode()).hexdigest()

    def condition(self, items: Tensor) -> dict[str, Tensor]:
        """See `Items`."""
        found: dict[str, Tensor] = {}
        for shard, here, local in self._by_shard(items):
            rows = self._rows(shard)[local]
            for name, values in self._tensors(shard).items():
                if name.startswith(CONDITION):
                    key = name.removeprefix(CONDITION)
                    if key not in found:
                        found[key] = values.new_empty((len(items), *values.shape[1:]))
                    found[key][here] = values[rows]
        return found

    def x0(self, items: Tensor) -> Tensor:
        """See `Items`."""
        if not self.has_samples:
            raise ValueError(f"{self.directory} holds prompts alone")
        found: Tensor | None = None
        for shard, here, local in self._by_shard(items):
            values = self._tensors(shard)[SAMPLES]
            if found is None:
                found = values.new_empty((len(items), *values.shape[1:]))
            found[here] = values[local]
        assert found is not None
        return found

    def text(self, item: int) -> str:
        """The prompt of an item."""
        ((shard, _, local),) = self._by_shard(torch.tensor([item]))
        row = int(self._rows(shard)[local])
        if shard not in self._texts:
            with self._reading(self._names[shard]) as opened:
                self._texts[shard] = json.loads(opened.metadata()[METADATA])["prompts"]
        return self._texts[shard][row]

    def _by_shard(self, items: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Shard, positions among `items`, and positions in the shard, of each shard concerned."""
        if len(items) and not 0 <= int(items.min()) <= int(items.max()) < len(self):
            raise IndexError(f"items are numbered from 0 to {len(self) - 1}")
        shards = torch.searchsorted(self._ends, items, right=True)
        for shard in sorted(set(shards.tolist())):
            here = (shards == shard).nonzero()[:, 0]
            yield shard, here, items[here] - (self._ends[shard - 1] if shard else 0)

    def _rows(self, shard: int) -> Tensor:
        return self._tensors(shard)[ROWS]

    def _tensors(self, shard: int) -> dict[str, Tensor]:
        if shard not in self._open:
            with self._reading(self._names[shard]) as opened:
                # On the CPU these are views of the mapped file: what is not used is not read.
                self._open[shard] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        return self._open[shard]

    def _reading(self, name: str) -> Any:
        file = self.directory / name
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged and cannot be read: {error}; {AGAIN}") from error

    def _load_unconditional(self) -> dict[str, Tensor]:
        file = self.directory / UNCONDITIONAL
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged and cannot be read: {error}; {AGAIN}") from error


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a complete data set.

    Raises:
        UserError: where there is none, or it is damaged.
    """
    document = read_own(directory, MANIFEST)
    if document is None:
        raise UserError(
            f"data.encoded: {directory} holds no complete encoded data; make it with `fewstep "
            f"encode` and the same recipe"
        )
    return document
