"""What samples are conditioned on, one by one: labels, prompts or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fewstep.data.items import Items


@final
@dataclass(frozen=True)
class Conditions:
    """Of samples 0, 1, ...; made when they are asked for, since those of prompts are large.

    Attributes:
        count: of the samples.
        of: numbers of samples, int64 [B] on the CPU -> each entry [B, ...], there.
        labels: int64 [count], where these are class labels.
        prompts: a text a sample, where there are any.
    """

    count: int
    of: Callable[[Tensor], Mapping[str, Tensor]]
    labels: Tensor | None = None
    prompts: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return self.count


def no_conditions(count: int) -> Conditions:
    """Of an unconditional network."""
    return Conditions(count, lambda numbers: {})


def label_conditions(labels: Tensor) -> Conditions:
    """A class for each sample, int64 [count]."""
    return Conditions(len(labels), lambda numbers: {"class_labels": labels[numbers]}, labels)


def item_conditions(items: Items, numbers: Tensor) -> Conditions:
    """Those of some items of a data set.

    Args:
        items: the data set.
        numbers: the item of each sample, int64 [count].
    """
    prompts = None
    if items.prompts is not None:
        prompts = tuple(items.prompts[number] for number in numbers.tolist())
    return Conditions(
        len(numbers), lambda samples: items.condition(numbers[samples]), prompts=prompts
    )


def tensor_conditions(condition: Mapping[str, Tensor], prompts: Sequence[str]) -> Conditions:
    """Those of prompts that have been encoded: each entry [count, ...], on the CPU."""
    return Conditions(
        len(prompts),
        lambda samples: {key: value[samples] for key, value in condition.items()},
        prompts=tuple(prompts),
    )


def conditions_in_turn(classes: int | None, items: Items | None, count: int) -> Conditions:
    """Of samples that stand for all: the items with prompts, or the classes, again and again.

    Args:
        classes: of the network.
        items: whose prompts samples can have, if the network takes any.
        count: number of samples.
    """
    if items is not None and items.prompts is not None:
        return item_conditions(items, torch.arange(count) % len(items))
    if classes is None:
        return no_conditions(count)
    return label_conditions(torch.arange(count) % classes)
