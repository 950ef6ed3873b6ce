"""What is sent to a worker for one phase, and what comes back. Only detached tensors cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import Tensor


@final
@dataclass(frozen=True)
class PhaseRequest:
    """One phase: trains one role and ends in at most one update of it.

    Attributes:
        cycle: 1, 2, ...
        name: unique in the cycle, e.g. "student" or "fake_score/2"; the key of its draw.
        role: the role trained.
        rollout: name of the phase whose batch and student samples it uses (its own, or the
            student's where the phases of a cycle share them).
        hands_over: whether later phases of the cycle use its student samples; who runs them keeps
            these until then.
        external: what other workers have computed for it, detached, by name: each [b, ...], the
            rows of the rank that gets it.
    """

    cycle: int
    name: str
    role: str
    rollout: str
    hands_over: bool = False
    external: Mapping[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class PhaseResult:
    """What became of a phase.

    Attributes:
        request: the phase, without its external data.
        updated: False where the update was skipped for non-finite numbers.
        attempt: how many phases have trained this role, this one included.
        metrics: loss, grad_norm, lr, skipped and what the method reports; means over samples.
    """

    request: PhaseRequest
    updated: bool
    attempt: int
    metrics: Mapping[str, float]


class Executor(Protocol):
    """What carries phases to the workers and waits for them: this process, or a cluster."""

    def run_phases(self, requests: Sequence[PhaseRequest]) -> list[PhaseResult]:
        """Run phases of one cycle, one after the other, each on every worker of its role."""
        ...
