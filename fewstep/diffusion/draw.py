"""Keyed random numbers: a pure function of (seed, cycle, phase, stream, sample id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written
in integer tensor operations: every sample has its own counter, so that a sample's numbers do not
depend on the batch it sits in, on the rank, on the device or on what was drawn before. The
global generators are neither read nor advanced.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@lru_cache(maxsize=256)
def _round_keys(key: int, device: torch.device) -> tuple[Tensor, ...]:
    """The ten rounds' keys, each int64 [2, 1] in the order that `philox` needs."""
    k0, k1 = key & _MASK, key >> 32
    rounds = [[(k0 + r * _WEYL[0]) & _MASK, (k1 + r * _WEYL[1]) & _MASK] for r in range(10)]
    ordered = [pair[::-1] if r % 2 == 0 else pair for r, pair in enumerate(rounds)]
    return torch.tensor(ordered, device=device)[:, :, None].unbind(0)


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor]:
    pair = torch.tensor(_MULTIPLIERS, device=device)[:, None]
    return pair, pair.flip(0)


def philox(counter: Tensor, key: int) -> Tensor:
    """Four words of random bits for each counter.

    Args:
        counter: int64 [4, N], each entry an unsigned 32-bit number.
        key: an unsigned 64-bit number, low word first.

    Returns:
        int64 [4, N] with unsigned 32-bit entries.
    """
    # Words 0 and 2 are multiplied and change places; so each round leaves both pairs swapped,
    # and the next one works in that order. A product wraps into the sign bit, which leaves its
    # 64 bits right; `odd` keeps all of them, since only its low half reaches `even`.
    even, odd = counter[0::2], counter[1::2]
    multipliers = _multipliers(counter.device)
    for step, round_key in enumerate(_round_keys(key, counter.device)):
        product = even * multipliers[step % 2]
        even = (product >> 32).bitwise_xor_(odd.flip(0)).bitwise_xor_(round_key)
        even.bitwise_and_(_MASK)
        odd = product
    odd = odd & _MASK
    return torch.stack([even[0], odd[0], even[1], odd[1]])


@final
@dataclass(frozen=True)
class Draw:
    """The random numbers of one phase of one cycle.

    Attributes:
        seed: the run's seed.
        cycle: the cycle's number.
        phase: the phase's name, unique in its cycle.
    """

    seed: int
    cycle: int
    phase: str

    def _digest(self, stream: str) -> int:
        text = repr((self.seed, self.cycle, self.phase, stream))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def words(self, stream: str, sample_ids: Tensor, count: int) -> Tensor:
        """Random bits: at least `count` words for each sample.

        Args:
            stream: what they are for; streams are independent of each other.
            sample_ids: int64 [B].
            count: words a sample; the first ones do not depend on how many are asked for.

        Returns:
            int64 [4, B, ceil(count / 4)], entries unsigned 32-bit.
        """
        blocks = -(-count // 4)
        counter = sample_ids.new_zeros(4, len(sample_ids), blocks)
        counter[0] = torch.arange(blocks, device=sample_ids.device)
        counter[1] = (sample_ids & _MASK)[:, None]
        counter[2] = (sample_ids >> 32)[:, None] & _MASK
        return philox(counter.flatten(1), self._digest(stream)).reshape(counter.shape)

    def uniform(
        self, stream: str, sample_ids: Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """One number in (0, 1) for each sample.

        Args:
            stream: what it is for; streams are independent of each other.
            sample_ids: int64 [B].
            dtype: of the result; computed in float64.

        Returns:
            [B], on the device of `sample_ids`.
        """
        words = self.words(stream, sample_ids, 1)[0, :, 0]
        # Rounding to float32 could reach 1.
        return ((words.double() + 0.5) / 2.0**32).to(dtype).clamp_(max=1 - 2.0**-24)

    def normal(
        self,
        stream: str,
        sample_ids: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Standard normal numbers by Box and Muller's transform, computed in float64.

        Args:
            stream: what they are for.
            sample_ids: int64 [B].
            shape: of one sample.
            dtype: of the result.

        Returns:
            [B, *shape], on the device of `sample_ids`.
        """
        count = math.prod(shape)
        words = self.words(stream, sample_ids, count).double()
        # In place: for small batches the time goes into the number of operations.
        radius = words[0::2].add(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = words[1::2] * (2 * math.pi / 2.0**32)
        pairs = torch.stack([torch.cos(angle), torch.sin(angle)]).mul_(radius)
        # [cosine or sine, pair, B, blocks] -> [B, blocks * 4]
        values = pairs.permute(2, 3, 1, 0).flatten(1)[:, :count]
        return values.to(dtype).reshape(len(sample_ids), *shape)

    def integers(self, stream: str, sample_ids: Tensor, high: int) -> Tensor:
        """One integer in [0, high) for each sample, uniform (bias below high / 2^32): int64 [B]."""
        return (self.words(stream, sample_ids, 1)[0, :, 0] * high) >> 32

    def choice(self, stream: str, high: int) -> int:
        """One integer in [0, high) for the whole phase, the same for all its samples and ranks."""
        return (self._digest(f"{stream}/choice") * high) >> 64


def permutation(seed: int, epoch: int, length: int, stream: str = "order") -> Tensor:
    """The data order of one epoch: a random permutation of range(length), int64, on the CPU.

    Args:
        seed: of the run.
        epoch: 0, 1, ...
        length: of the data set.
        stream: orders of other names are independent of each other.
    """
    words = Draw(seed, epoch, "data").words(stream, torch.arange(length), 2)[:2, :, 0]
    return torch.argsort(words[0] * 2**31 + (words[1] >> 1), stable=True)
