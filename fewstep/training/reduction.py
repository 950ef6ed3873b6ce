"""From micro-batches on many ranks to one mean: what is cut, what is summed, what it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fewstep.errors import TrainingError
from fewstep.methods.method import PhaseLoss
from fewstep.parallel.ranks import Ranks, split_evenly


@final
@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a phase's batch; `count` is 0 for a repetition that must change nothing."""

    rows: range
    count: int


def micro_batches(batch_size: int, ranks: Ranks, micro_batch_size: int | None) -> list[MicroBatch]:
    """This rank's portions of a batch: as many on every rank, since all must call as often.

    A rank with too few samples for that repeats its last one, which does not count.
    """
    size = micro_batch_size or batch_size
    most = -(-batch_size // ranks.size)
    portions = -(-most // size)
    mine = ranks.share(batch_size)
    if portions <= len(mine):
        rows = [mine[start : start + size] for start in range(0, len(mine), size)]
        if len(rows) < portions:
            rows = split_evenly(mine, portions)
        return [MicroBatch(r, len(r)) for r in rows]
    alone = [MicroBatch(mine[i : i + 1], 1) for i in range(len(mine))]
    return alone + [MicroBatch(mine[-1:], 0)] * (portions - len(mine))


def local_sums(
    losses: Sequence[tuple[PhaseLoss, MicroBatch]], found: Sequence[Tensor], replicas: int
) -> tuple[list[str], Tensor]:
    """What this rank adds to the sums of a phase, in one row for one collective.

    Args:
        losses: each micro-batch's loss and its rows.
        found: this rank's parts of the gradients.
        replicas: how many ranks hold the same parts.

    Returns:
        Names, and their numbers, float64 [N]: "plain" and "weighted" (micro-batches without and
        with a normalizer), "entries" and "nonfinite" (of what the method checked), "square" (of
        the gradients), "wrong" (normalizers that are not positive and finite), "weight" (sum of
        normalizers), and of each metric, the loss among them, the sum over samples, or over
        normalizers.
    """
    counted = [(loss, part) for loss, part in losses if part.count]
    device, keys = losses[0][0].loss.device, list(losses[0][0].metrics)
    normalizers = [loss.normalizer for loss, _ in counted if loss.normalizer is not None]
    host: dict[str, float] = {
        "plain": len(counted) - len(normalizers),
        "weighted": len(normalizers),
        "entries": sum(loss.entries for loss, _ in counted),
    }
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.nn.utils.get_total_norm(found, foreach=True).to(device) if found else zero
    sums = {
        "square": norm.double() ** 2 / replicas,
        "nonfinite": zero,
        "weight": zero,
        "wrong": zero,
    }
    for loss, _ in counted:
        if loss.nonfinite_entries is not None:
            sums["nonfinite"] = sums["nonfinite"] + loss.nonfinite_entries
        if loss.normalizer is not None:
            number = torch.as_tensor(loss.normalizer, dtype=torch.float64, device=device)
            sums["weight"] = sums["weight"] + number
            sums["wrong"] = sums["wrong"] + ~(torch.isfinite(number) & (number > 0))
    rows = [
        torch.stack([v.double() for v in (loss.loss, *(loss.metrics[key] for key in keys))])
        * (part.count if loss.normalizer is None else loss.normalizer)
        for loss, part in counted
    ]
    numbers = torch.cat(
        [
            torch.tensor(list(host.values()), dtype=torch.float64, device=device),
            torch.stack(list(sums.values())),
            torch.stack(rows).sum(0),
        ]
    )
    return [*host, *sums, "of loss", *(f"of {key}" for key in keys)], numbers


def check_normalizers(role: str, totals: Mapping[str, float]) -> float | None:
    """The sum of a phase's normalizers; None where it has none.

    Raises:
        TrainingError: where only some micro-batches have one, or one is not positive and finite.
    """
    if not totals["weighted"]:
        return None
    if totals["plain"]:
        raise TrainingError(f"{role}: some micro-batches have a normalizer and some have none")
    if totals["wrong"] or not math.isfinite(totals["weight"]):
        raise TrainingError(
            f"{role}: {totals['wrong']:.0f} of {totals['weighted']:.0f} loss normalizers are not "
            f"positive and finite"
        )
    return totals["weight"]


def phase_values(
    totals: Mapping[str, float], weight: float | None, batch_size: int
) -> dict[str, float]:
    """Means over samples, or over normalizers, from a phase's sums.

    Returns:
        "loss", "grad_norm", the method's metrics, and "finite_share" of the method's entries.
    """
    values = {
        key.removeprefix("of "): value / (weight or batch_size)
        for key, value in totals.items()
        if key.startswith("of ")
    }
    square = totals["square"]
    norm = math.sqrt(square) if math.isfinite(square) else square
    values["grad_norm"] = norm / (weight or 1.0)
    if totals["entries"]:
        values["nonfinite_entries"] = totals["nonfinite"]
        values["finite_share"] = 1 - totals["nonfinite"] / totals["entries"]
    if "sample_mean_square" in values:
        variance = values.pop("sample_mean_square") - values["sample_mean"] ** 2
        values["sample_std"] = (
            math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else variance
        )
    return values


def concatenate(parts: Sequence[tuple[Mapping[str, Tensor], MicroBatch]]) -> dict[str, Tensor]:
    """Tensors of this rank's micro-batches as one, in the order of the samples."""
    counted = [tensors for tensors, part in parts if part.count]
    return {key: torch.cat([tensors[key] for tensors in counted]) for key in counted[0]}
