"""What arguments of the command line mean: numbers, prompts, and what samples are made of."""

from __future__ import annotations

from pathlib import Path

import torch

from fewstep.data.conditions import Conditions, label_conditions
from fewstep.data.sources import broken_text
from fewstep.data.tables import read_lines
from fewstep.errors import UserError
from fewstep.source import Source


def parse_numbers(text: str, option: str, least: int, most: int) -> list[int]:
    """Numbers and ranges, as in "3,1,4" or "0-9"; raises UserError naming the option."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError as error:
            raise UserError(
                f"{option}: {part!r} is no number or range; write 3,1,4 or 0-9"
            ) from error
        # Before it is expanded: a range may be longer than memory.
        if not least <= low <= high <= most:
            raise UserError(
                f"{option}: {part.strip()!r} is given; it takes numbers from {least} to {most}"
            )
        numbers += range(low, high + 1)
    return numbers


def read_prompts(file: Path | None, prompts: list[str]) -> list[str]:
    """The lines of a text file, without empty ones, and prompts of the command line after them."""
    lines: list[str] = []
    if file is not None:
        if file.suffix.lower() != ".txt" or not file.is_file():
            raise UserError(f"--prompts: {file} is no text file (.txt) with a prompt a line")
        lines = [record.text for record in read_lines(file) if record.text and record.text.strip()]
        if not lines:
            raise UserError(f"--prompts: {file} has no prompt in it; write one a line")
    for prompt in prompts:
        if (problem := broken_text(prompt)) is not None:
            raise UserError(f"--prompt: {problem}")
    return [*lines, *prompts]


def choose_conditions(
    source: Source, wanted: str | None, prompts: list[str], count: int | None
) -> Conditions:
    """What `sample` was asked for: classes or prompts, repeated up to `count`."""
    classes = source.roles.model.classes
    if wanted is not None and classes is None:
        what = "takes prompts" if source.roles.model.prompted else "is unconditional"
        raise UserError(f"--classes: the network {what}")
    if prompts:
        if not source.roles.model.prompted:
            raise UserError(
                "--prompts: the network takes none" + ("; use --classes" * bool(classes))
            )
        return source.encode([prompts[i % len(prompts)] for i in range(count or len(prompts))])
    if wanted is not None:
        chosen = parse_numbers(wanted, "--classes", least=0, most=(classes or 1) - 1)
        total = count or len(chosen)
        return label_conditions(torch.tensor([chosen[i % len(chosen)] for i in range(total)]))
    return source.conditions(count or classes or 16)
