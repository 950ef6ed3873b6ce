"""A small network that tells real from made by the features of another network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn


@final
class ClassifierHead(nn.Module):
    """One logit a sample, from the tokens of some blocks; above 0: real.

    DMD2's own head (Yin et al., arXiv 2405.14867, section 4.3) shrinks a feature map by
    convolutions, which are for images of one size. This one takes tokens: each block's are read one
    by one, and weighed by what they say.
    """

    def __init__(self, widths: Sequence[int], hidden: int | None = None) -> None:
        """Build a head with fresh weights, from the global generator.

        Args:
            widths: of the tokens of each block.
            hidden: the head's own width; None: that of the widest block.
        """
        super().__init__()
        hidden = hidden or max(widths)
        self.readers = nn.ModuleList(_Reader(width, hidden) for width in widths)
        self.join = nn.Linear(len(widths) * hidden, hidden)
        self.leave = nn.Linear(hidden, 1)

    def forward(self, *tokens: Tensor) -> Tensor:
        """`tokens`: for each block [B, T, D] -> logits [B, 1]."""
        read = [reader(each) for reader, each in zip(self.readers, tokens, strict=True)]
        h = nn.functional.silu(self.join(torch.cat(read, dim=1)))
        logits: Tensor = self.leave(h)
        return logits


@final
class _Reader(nn.Module):
    """From the tokens of one block to one vector: each is read alone, then they are averaged."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, hidden)
        self.weigh = nn.Linear(hidden, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T, D] -> [B, hidden]."""
        h = nn.functional.silu(self.enter(self.norm(tokens)))
        return (torch.softmax(self.weigh(h), dim=1) * h).sum(1)
