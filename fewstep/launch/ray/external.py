"""External data: what processes compute for a phase of others, and the check on arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fewstep.errors import TrainingError
from fewstep.methods.method import TensorSpec


@final
@dataclass(frozen=True)
class ExternalData:
    """Detached tensors for one rank's samples of a phase, in main memory.

    Attributes:
        cycle: whose samples these are.
        rollout: name of the phase whose student samples they are, or belong to.
        rank: of the group that they are for.
        versions: student updates that the weights behind each sample have seen, int64 [b].
        sample_ids: int64 [b].
        tensors: by name, each [b, ...].
    """

    cycle: int
    rollout: str
    rank: int
    versions: Tensor
    sample_ids: Tensor
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        held = (self.versions, self.sample_ids, *self.tensors.values())
        return sum(t.nbytes for t in held)


@final
@dataclass(frozen=True)
class Expected:
    """What a rank expects of external data.

    Attributes:
        cycle: of the samples.
        rollout: as in `ExternalData`.
        rank: its own.
        versions: student updates that may be behind the samples.
        sample_ids: int64 [b].
        tensors: what they are called, and of what shape and dtype a sample is.
    """

    cycle: int
    rollout: str
    rank: int
    versions: range
    sample_ids: Tensor
    tensors: Mapping[str, TensorSpec]


def check_external(found: ExternalData, expected: Expected) -> None:
    """Raise TrainingError, naming everything that is not as expected, unless nothing is."""
    wrong = [
        f"{what} is {getattr(found, what)!r} instead of {getattr(expected, what)!r}"
        for what in ("cycle", "rollout", "rank")
        if getattr(found, what) != getattr(expected, what)
    ]
    seen = sorted(set(found.versions.tolist()))
    if len(found.versions) != len(expected.sample_ids) or set(seen) - set(expected.versions):
        wanted = f"{expected.versions.start} to {expected.versions.stop - 1}"
        wrong.append(
            f"{len(found.versions)} samples are those of a student after "
            f"{', '.join(map(str, seen))} updates, wanted {wanted}"
        )
    if found.sample_ids.dtype != torch.int64 or not torch.equal(
        found.sample_ids, expected.sample_ids.cpu()
    ):
        wrong.append(
            f"sample ids are {_some(found.sample_ids)} instead of {_some(expected.sample_ids)}"
        )
    if missing := sorted(expected.tensors.keys() - found.tensors.keys()):
        wrong.append(f"{', '.join(missing)} is missing")
    if extra := sorted(found.tensors.keys() - expected.tensors.keys()):
        wrong.append(f"{', '.join(extra)} is left over")
    for name, spec in expected.tensors.items():
        if name in found.tensors:
            wrong += _differences(name, found.tensors[name], len(expected.sample_ids), spec)
    if wrong:
        raise TrainingError(f"external data is not what was expected: {'; '.join(wrong)}")


def _differences(name: str, tensor: Tensor, samples: int, spec: TensorSpec) -> list[str]:
    shape, found = (samples, *spec.shape), []
    if tuple(tensor.shape) != shape:
        found.append(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
    if tensor.dtype != spec.dtype:
        found.append(f"{name} is of {tensor.dtype} instead of {spec.dtype}")
    if tensor.requires_grad:
        found.append(f"{name} carries a graph")
    return found


def _some(ids: Tensor) -> str:
    values = ids.flatten()[:6].tolist()
    more = ", ..." if ids.numel() > 6 else ""
    return f"{ids.numel()} of them ({', '.join(map(str, values))}{more})"
