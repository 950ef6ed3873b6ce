"""How much memory a rank of a run needs, counted before anything is loaded.

Weights, gradients and optimizers are counted exactly, from the shapes of the networks. What comes
and goes in a cycle (gathered units, activations) is estimated, and named so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import final

from torch import nn

from fewstep.errors import UserError
from fewstep.parallel.settings import ParallelKind
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.storage import Storage

GIGABYTE = 10**9
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MOMENTS = 2
"""Numbers that AdamW keeps for each that it trains (Loshchilov & Hutter, arXiv 1711.05101)."""
STEP_BYTES = 4
"""AdamW's count of steps, of each tensor."""
REDUCED_BYTES = 4
"""Gradients are reduced in float32."""
LIBRARIES = GIGABYTE
"""An estimate of what CUDA and its libraries take of a device for themselves."""
FRAGMENTS = 0.05
"""An estimate of the share that lies between torch's blocks and cannot be used."""


@final
@dataclass(frozen=True)
class Devices:
    """Accelerators of one kind.

    Attributes:
        count: how many.
        bytes: memory of each.
    """

    count: int
    bytes: int


@final
@dataclass(frozen=True)
class Held:
    """One parameter or buffer that a run keeps.

    Attributes:
        network: the network that it is in.
        role: whose it is; None for a buffer.
        unit: name of the block that it is gathered with; "" for what is in none.
        shape: of the whole tensor.
        width: bytes of a number.
        trained: whether it gets gradients.
    """

    network: str
    role: str | None
    unit: str
    shape: tuple[int, ...]
    width: int
    trained: bool

    @property
    def numbers(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return self.numbers * self.width


@final
@dataclass(frozen=True)
class Spread:
    """How networks are spread over ranks.

    Attributes:
        kind: as in `parallel.kind`.
        ranks: all of them.
        shard_size: ranks that share one copy of the weights; 1 where they are whole.
        offload: whether shards lie in main memory.
        gathered_width: bytes of a weight that is gathered to compute with.
        whole_gradients: whether gradients add up unsharded, over micro-batches.
    """

    kind: ParallelKind
    ranks: int
    shard_size: int = 1
    offload: bool = False
    gathered_width: int = 4
    whole_gradients: bool = False

    @property
    def sharded(self) -> bool:
        """Whether a network is gathered a unit at a time."""
        return self.kind in ("fsdp1", "fsdp2")


@final
@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of the fullest rank, and in its main memory.

    Attributes:
        frozen: weights that are not trained, the average among them.
        trained: weights that are.
        buffers: tensors of networks that are not parameters: whole on every rank.
        optimizer: moments of all trained roles.
        gradients: of the role in training; the largest.
        communication: whole gradients on their way to other ranks (kinds none and ddp).
        units: of a sharded network, what is gathered at once. An estimate.
        copies: weights in the lower precision that is computed in. An estimate.
        activations: what a micro-batch needs. An estimate; None: unknown.
        decoder: of a text-to-image network, kept from the first validation on.
        images: what it needs to make images. An estimate.
        rollout: networks of the rollout workers on the same device.
        main_memory: what `parallel.cpu_offload` and `placement.offload` keep off the device.
    """

    frozen: int = 0
    trained: int = 0
    buffers: int = 0
    optimizer: int = 0
    gradients: int = 0
    communication: int = 0
    units: int = 0
    copies: int = 0
    activations: int | None = 0
    decoder: int = 0
    images: int = 0
    rollout: int = 0
    main_memory: int = 0

    @property
    def kept(self) -> int:
        """What is there all the time."""
        weights = self.frozen + self.trained + self.buffers + self.decoder + self.rollout
        return weights + self.optimizer

    @property
    def passing(self) -> int:
        """What comes and goes with a phase, all of it at once: no less than it needs.

        No images are made while a phase keeps activations.
        """
        moving = self.gradients + self.communication + self.units + self.copies
        return moving + max(self.activations or 0, self.images)

    @property
    def needed(self) -> int:
        """What tensors need."""
        return self.kept + self.passing

    @property
    def reserve(self) -> int:
        """For what is no tensor of ours. An estimate."""
        return LIBRARIES + round(FRAGMENTS * self.needed)

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.needed + self.reserve


def parse_devices(text: str) -> Devices:
    """Read "8x80GB": eight devices of 80 * 10^9 bytes; GiB are 2^30.

    Raises:
        UserError: for anything else.
    """
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,12}(?:\.[0-9]{1,12})?)([A-Za-z]+)", text)
    wrong = f"--gpus: {text!r} is given; it should be like 1x80GB, 8x80GB or 8x24GiB"
    if found is None:
        raise UserError(f"{wrong}: how many, x, and the memory of each")
    if found[3] not in UNITS:
        raise UserError(f"{wrong}; {found[3]!r} is none of {', '.join(UNITS)}")
    devices = Devices(int(found[1]), round(float(found[2]) * UNITS[found[3]]))
    if devices.count < 1 or devices.bytes < 1:
        raise UserError(f"{wrong}; neither number may be 0")
    return devices


def held_tensors(
    storage: Storage,
    optimizers: Mapping[str, OptimizerSettings],
    blocks: Callable[[nn.Module], Mapping[str, nn.Module]],
    roles: Sequence[str],
    width: int,
) -> list[Held]:
    """Every tensor of a storage once; they may be on the meta device.

    Args:
        storage: of some roles.
        optimizers: settings of those that are trained.
        blocks: the parts of a network that are gathered as one.
        roles: all of the storage's.
        width: bytes of a weight as the run keeps it.
    """
    owner, trained = {}, set()
    for role in roles:
        for key, parameter in storage.parameters(role).items():
            owner[id(parameter)] = role
            if role in optimizers and optimizers[role].trains(key):
                trained.add(id(parameter))
    found = []
    for name, network in storage.networks.items():
        parts = {} if name in storage.heads else blocks(network)
        unit = {id(p): path for path, block in parts.items() for p in block.parameters()}
        for parameter in network.parameters():
            of, role = id(parameter), owner.get(id(parameter), name)
            shape = tuple(parameter.shape)
            found.append(Held(name, role, unit.get(of, ""), shape, width, of in trained))
        for buffer in network.buffers():
            wide = width if buffer.is_floating_point() else buffer.element_size()
            found.append(Held(name, None, "", tuple(buffer.shape), wide, False))
    return found


def local_numbers(held: Held, spread: Spread) -> int:
    """Numbers of a tensor that the fullest rank holds.

    FSDP2 cuts the first dimension into equal parts, the last ones padded. FSDP1 cuts a unit's flat
    row; here each tensor of it is rounded up.
    """
    if held.role is None or not spread.sharded:
        return held.numbers
    if spread.kind == "fsdp1" or not held.shape:
        return -(-held.numbers // spread.shard_size)
    first, *rest = held.shape
    return -(-first // spread.shard_size) * math.prod(rest)


def local_bytes(held: Sequence[Held], spread: Spread) -> int:
    """Bytes of some tensors on the fullest rank."""
    return sum(local_numbers(h, spread) * h.width for h in held)


def optimizer_bytes(held: Sequence[Held], spread: Spread) -> int:
    """AdamW's moments on the fullest rank, in the weights' own type, and its counts of steps."""
    trained = [h for h in held if h.trained]
    return MOMENTS * local_bytes(trained, spread) + STEP_BYTES * len(trained)


def of_largest_role(held: Sequence[Held], count: Callable[[Sequence[Held]], int]) -> int:
    """What `count` gives for the trained tensors of the role for which it gives most."""
    roles = {h.role for h in held if h.trained}
    return max((count([h for h in held if h.trained and h.role == r]) for r in roles), default=0)


def gradient_bytes(held: Sequence[Held], spread: Spread) -> int:
    """Gradients of the role in training: parts, or whole while micro-batches add up."""
    if spread.whole_gradients:
        return of_largest_role(held, whole_bytes)
    return of_largest_role(held, lambda some: local_bytes(some, spread))


def communication_bytes(held: Sequence[Held], spread: Spread) -> int:
    """Kind none: one row of a role's gradients. Kind ddp: buckets of every trained role, kept."""
    if spread.ranks == 1 or spread.sharded:
        return 0
    if spread.kind == "ddp":
        return whole_bytes([h for h in held if h.trained])
    return of_largest_role(held, whole_bytes)


def unit_bytes(held: Sequence[Held], spread: Spread) -> int:
    """What FSDP2 holds of units beyond their shards, while one follows the other.

    The shard's copy that is sent, the flat row that it arrives in, the unit itself, and still the
    flat row of the unit before; in a backward pass also the gradients of a unit and the float32
    row that they are reduced from (`docs/scaling.md` compares that with measurements).
    """
    if not spread.sharded:
        return 0
    units: dict[tuple[str, str], list[Held]] = {}
    for h in held:
        if h.role is not None:
            units.setdefault((h.network, h.unit), []).append(h)

    def one(unit: Sequence[Held]) -> int:
        gathered = sum(h.numbers for h in unit) * spread.gathered_width
        trained = of_largest_role(unit, lambda some: sum(h.numbers for h in some))
        gradients = trained * (spread.gathered_width + REDUCED_BYTES)
        return 3 * gathered + -(-gathered // spread.shard_size) + gradients

    return max(map(one, units.values()), default=0)


def whole_bytes(held: Sequence[Held]) -> int:
    """Bytes of some tensors, unsharded."""
    return sum(h.bytes for h in held)


def rank_memory(held: Sequence[Held], spread: Spread) -> RankMemory:
    """The memory of the fullest rank that holds these tensors, without activations.

    Args:
        held: all tensors of its networks.
        spread: over the ranks.
    """
    own = [h for h in held if h.role is not None]
    frozen = local_bytes([h for h in own if not h.trained], spread)
    trained = local_bytes([h for h in own if h.trained], spread)
    optimizer, gradients = optimizer_bytes(held, spread), gradient_bytes(held, spread)
    away = 0
    if spread.offload:
        away, frozen, trained, optimizer = frozen + trained + optimizer, 0, 0, 0
        if not spread.whole_gradients:
            away, gradients = away + gradients, 0
    return RankMemory(
        frozen=frozen,
        trained=trained,
        buffers=whole_bytes([h for h in held if h.role is None]),
        optimizer=optimizer,
        gradients=gradients,
        communication=communication_bytes(held, spread),
        units=unit_bytes(held, spread),
        main_memory=away,
    )


def on_one_device(groups: Sequence[RankMemory], rollout: int, take_turns: bool) -> RankMemory:
    """Several trainer groups, and rollout workers, on one device.

    Groups compute one after another, so that what passes is that of the neediest.

    Args:
        groups: the fullest rank of each.
        rollout: bytes of the rollout workers' networks.
        take_turns: whether those who do not compute are in main memory (`placement.offload`).
    """
    neediest = max(groups, key=lambda group: group.needed if take_turns else group.passing)
    if take_turns:
        away = sum(group.kept for group in groups) - neediest.kept
        values = vars(neediest) | {"main_memory": neediest.main_memory + away + rollout}
        # Weights are pushed from an actor that is awake to workers that are.
        return RankMemory(**(values | {"rollout": rollout}))
    kept = ("frozen", "trained", "buffers", "optimizer", "main_memory")
    sums = {f: sum(getattr(group, f) for group in groups) for f in kept}
    rest = {f.name: getattr(neediest, f.name) for f in fields(RankMemory) if f.name not in kept}
    return RankMemory(**(rest | sums | {"rollout": rollout}))
