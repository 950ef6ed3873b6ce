"""Time of a cycle on paper: its arithmetic and its collectives; `docs/scaling.md` explains it."""

from dataclasses import dataclass

from benchmarks.scaling_model import (
    Network,
    Plan,
    expected_passes,
    gathered_bytes,
    gathers,
    replica_bytes,
    scattered_bytes,
    scatters,
    scoring_passes,
)


@dataclass(frozen=True)
class Machine:
    """GPUs and links.

    Attributes:
        gpus_a_node: joined by the fast link.
        memory: bytes of a GPU.
        fast_link: bytes a second and direction within a node, of a GPU.
        network: bytes a second and direction between nodes, of a GPU.
        link_efficiency: share of these that collectives reach.
        step_seconds: latency of one step of a ring.
        flops: a second, of a GPU, in the compute type.
        utilisation: share of these that the network reaches.
    """

    gpus_a_node: int
    memory: float
    fast_link: float
    network: float
    link_efficiency: float
    step_seconds: float
    flops: float
    utilisation: float


def forward_equivalents(plan: Plan) -> float:
    """Compute of a cycle in forward passes of one sample.

    A backward pass is two of them; one where the base is frozen, since most weights need no
    gradient; and one more where blocks are recomputed. Fused scoring computes as much as separate.
    """
    backward = (2 if plan.storage == "independent" else 1) + plan.recompute
    student = plan.mean_exit + 1 + backward + scoring_passes("separate", plan.guided)
    fake = plan.mean_exit + 1 + 1 + backward
    return student + plan.fake_updates * fake


def compute_seconds(network: Network, plan: Plan, machine: Machine) -> float:
    """Time of a cycle's arithmetic."""
    work = forward_equivalents(plan) * plan.batch * network.flops
    return work / (machine.flops * machine.utilisation)


def ring_seconds(bytes_: float, calls: float, group: int, machine: Machine) -> float:
    """Time of all-gathers or reduce-scatters on rings through a group of consecutive ranks.

    Every byte crosses every link once. Where the group leaves the node, as many rings as the node
    has GPUs share its network cards, one each: together they carry gpus_a_node times one card.
    """
    rate = machine.fast_link
    if group > machine.gpus_a_node:
        rate = min(rate, machine.gpus_a_node * machine.network)
    moved = bytes_ * (group - 1) / group
    return moved / (rate * machine.link_efficiency) + calls * (group - 1) * machine.step_seconds


def replica_seconds(network: Network, plan: Plan, calls: float, machine: Machine) -> float:
    """Time of the all-reduces between replicas: a ring twice, each GPU through its own card."""
    replicas = plan.ranks // plan.shard_size
    inside = plan.ranks <= machine.gpus_a_node
    rate = (machine.fast_link if inside else machine.network) * machine.link_efficiency
    moved = 2 * replica_bytes(network, plan) * (replicas - 1) / replicas
    return moved / rate + 2 * calls * (replicas - 1) * machine.step_seconds


def communication_seconds(network: Network, plan: Plan, machine: Machine) -> float:
    """Time of a cycle's collectives if nothing else went on; L + 1 units."""
    units, passes = network.blocks + 1, expected_passes(plan)
    gathering = gathered_bytes(network, passes, plan)
    calls = gathers(units, passes, plan) + scatters(units, plan)
    whole = gathering + scattered_bytes(network, plan)
    rings = ring_seconds(whole, calls, plan.shard_size, machine)
    return rings + replica_seconds(network, plan, scatters(units, plan), machine)
