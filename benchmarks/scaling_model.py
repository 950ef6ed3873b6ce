"""Memory and communication of a cycle on paper; `docs/scaling.md` explains it.

Numbers are per rank unless their names say otherwise. Nothing here needs torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Storage = Literal["independent", "shared_base"]
Scoring = Literal["separate", "fused"]

ADAPTERS = 3  # on a shared base: student, fake_score, student_ema
NETWORKS = 4  # each role's own: student, fake_score, teacher_score, student_ema
ADAM_MOMENTS = 2
MASTER_BYTES = 4  # weights, moments and reduced gradients are float32


@dataclass(frozen=True)
class Network:
    """The network of one role.

    Attributes:
        parameters: N.
        blocks: L, transformer blocks.
        largest_unit: parameters of the largest part that is gathered as one.
        width: numbers of a token between blocks.
        tokens: of a sample.
        flops: of one forward pass of one sample.
        saved_a_token: numbers a block keeps of a token for its backward pass, over the width.
    """

    parameters: float
    blocks: int
    largest_unit: float
    width: int = 0
    tokens: int = 0
    flops: float = 0.0
    saved_a_token: float = 24.0


@dataclass(frozen=True)
class Plan:
    """How a network is distilled, and on what.

    Attributes:
        storage: where the roles' weights live.
        scoring: a network call for each score, or one for all.
        ranks: W.
        shard_size: F, ranks that share one copy of the weights (W: no hybrid sharding).
        batch: B, samples of a rank in a phase.
        micro_batches: of a rank in a phase.
        reduce_each: whether gradients are reduced after each of them, and not after the last.
        steps: S, of the student.
        fake_updates: K.
        guided: whether the teacher is called twice.
        lora_share: r, parameters of one adapter over those of the base.
        recompute: activation checkpointing.
        gather_bytes: of a gathered weight: 2 in bfloat16.
    """

    storage: Storage
    scoring: Scoring
    ranks: int
    shard_size: int
    batch: int = 1
    micro_batches: int = 1
    reduce_each: bool = False
    steps: int = 4
    fake_updates: int = 5
    guided: bool = True
    lora_share: float = 0.02
    recompute: bool = True
    gather_bytes: int = 2

    @property
    def mean_exit(self) -> float:
        """Expected student steps before the exit: it is uniform on 0 ... S-1."""
        return (self.steps - 1) / 2

    @property
    def trained_share(self) -> float:
        """Parameters that one phase trains, over N."""
        return 1.0 if self.storage == "independent" else self.lora_share


# --- passes -------------------------------------------------------------------------------------


def scoring_passes(scoring: Scoring, guided: bool) -> int:
    """Passes that score a sample: fake, teacher and, where it is guided, teacher without label."""
    return 1 if scoring == "fused" else 3 if guided else 2


def student_passes(exit_step: float, scoring: Scoring, guided: bool) -> float:
    """Passes of a student phase, each of which needs all weights of a network once.

    The rollout before the exit, the exit step forward and backward, and the scores between.
    """
    return exit_step + 2 + scoring_passes(scoring, guided)


def fake_passes(exit_step: float) -> float:
    """Passes of a fake_score phase: rollout, exit step without gradient, forward and backward."""
    return exit_step + 1 + 2


def cycle_passes(student_exit: float, fake_exits: Sequence[float], plan: Plan) -> float:
    """Passes of a cycle that leaves at these steps."""
    student = student_passes(student_exit, plan.scoring, plan.guided)
    return student + sum(map(fake_passes, fake_exits))


def expected_passes(plan: Plan) -> float:
    """Passes of a cycle on average."""
    return cycle_passes(plan.mean_exit, [plan.mean_exit] * plan.fake_updates, plan)


# --- communication ------------------------------------------------------------------------------


def gathered_parameters(network: Network, plan: Plan) -> float:
    """Parameters that one pass gathers: with a shared base all adapters lie in its units."""
    adapters = 0.0 if plan.storage == "independent" else ADAPTERS * plan.lora_share
    return network.parameters * (1 + adapters)


def gathers(units: int, passes: float, plan: Plan) -> float:
    """All-gathers: one for each unit and pass (arXiv 2304.11277, section 3)."""
    return units * passes * plan.micro_batches


def gathered_bytes(network: Network, passes: float, plan: Plan) -> float:
    """Bytes of the gathered units; a rank receives the share (F-1)/F of them."""
    whole = gathered_parameters(network, plan) * plan.gather_bytes
    return passes * plan.micro_batches * whole


def reductions(plan: Plan) -> int:
    """How often a cycle reduces the gradients of a unit: once a phase, or a micro-batch."""
    return (1 + plan.fake_updates) * (plan.micro_batches if plan.reduce_each else 1)


def scatters(units: int, plan: Plan) -> int:
    """Reduce-scatters: each reduces the gradients of one unit."""
    return units * reductions(plan)


def scattered_bytes(network: Network, plan: Plan) -> float:
    """Bytes that go into the reduce-scatters, in float32; a rank sends (F-1)/F of them."""
    return reductions(plan) * network.parameters * plan.trained_share * MASTER_BYTES


def replica_bytes(network: Network, plan: Plan) -> float:
    """Bytes that go into the all-reduces between replicas; 0 where there is one copy."""
    return scattered_bytes(network, plan) / plan.shard_size if plan.ranks > plan.shard_size else 0.0


# --- memory -------------------------------------------------------------------------------------


def weight_bytes(network: Network, plan: Plan) -> float:
    """Shards of all roles' weights."""
    one = network.parameters * MASTER_BYTES / plan.shard_size
    return one * (NETWORKS if plan.storage == "independent" else 1 + ADAPTERS * plan.lora_share)


def optimizer_bytes(network: Network, plan: Plan) -> float:
    """Shards of Adam's moments of the student and the fake score."""
    trained = 2 * network.parameters * plan.trained_share
    return trained * ADAM_MOMENTS * MASTER_BYTES / plan.shard_size


def gradient_bytes(network: Network, plan: Plan) -> float:
    """Gradients of the role in training: shards, or whole while micro-batches add up."""
    whole = network.parameters * plan.trained_share * MASTER_BYTES
    return whole / plan.shard_size if plan.micro_batches == 1 or plan.reduce_each else whole


def unit_bytes(network: Network, plan: Plan) -> float:
    """What comes and goes with the units: buffers of gathers, and one unit's gradients.

    While a unit is gathered there are its shard's copy that is sent, the flat buffer that it
    arrives in, the unit itself, and still the flat buffer of the one before. In the backward pass
    also the gradients of a unit and the flat float32 buffer that they are reduced from.
    """
    shared = plan.storage == "shared_base"
    unit = network.largest_unit * (1 + ADAPTERS * plan.lora_share if shared else 1)
    gradients = network.largest_unit * plan.trained_share * (plan.gather_bytes + MASTER_BYTES)
    return (3 + 1 / plan.shard_size) * unit * plan.gather_bytes + gradients


def activation_bytes(network: Network, plan: Plan) -> float:
    """What a forward pass keeps: every block's, or the inputs of all and one block's."""
    token = plan.batch / plan.micro_batches * network.tokens * network.width * plan.gather_bytes
    if plan.recompute:
        return token * (network.blocks + network.saved_a_token)
    return token * network.blocks * network.saved_a_token


def memory_bytes(network: Network, plan: Plan) -> float:
    """All of the above at once: no less than any point of a cycle needs.

    In a backward pass gradients come while activations go, so that not all is there together.
    """
    parts = (weight_bytes, optimizer_bytes, gradient_bytes, unit_bytes, activation_bytes)
    return sum(part(network, plan) for part in parts)
