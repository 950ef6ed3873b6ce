"""The tables of `docs/scaling.md`: the model applied to a network of 20 billion parameters.

`python -m benchmarks.scaling_tables` prints them as Markdown.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.scaling_model import (
    Network,
    Plan,
    activation_bytes,
    expected_passes,
    gathered_bytes,
    gradient_bytes,
    memory_bytes,
    optimizer_bytes,
    unit_bytes,
    weight_bytes,
)
from benchmarks.scaling_time import (
    Machine,
    communication_seconds,
    compute_seconds,
    forward_equivalents,
)

GB = 1e9
BLOCKS, WIDTH, RANK = 60, 3072, 64
TOKENS = 64 * 64 + 512  # of an image of 1024 x 1024, cut 16-fold, and of its text
# Numbers of a block's matrices over WIDTH ** 2: modulation, attention and MLP, each twice (image
# and text have weights of their own). A token meets half of the last two.
IN_A_BLOCK, MET_BY_A_TOKEN = 6 + 6 + 4 + 4 + 8 + 8, 4 + 8
# Of a LoRA adapter on attention and MLP over WIDTH * RANK: two sides of each matrix.
ADAPTER_IN_A_BLOCK = 8 * 2 + 4 * 5


def twenty_billion() -> Network:
    """A network of the size of Qwen-Image: 60 blocks of two streams, 3072 wide."""
    matrices = 2 * MET_BY_A_TOKEN * WIDTH**2 * TOKENS
    attention = 4 * WIDTH * TOKENS**2
    return Network(
        parameters=BLOCKS * IN_A_BLOCK * WIDTH**2,
        blocks=BLOCKS,
        largest_unit=IN_A_BLOCK * WIDTH**2,
        width=WIDTH,
        tokens=TOKENS,
        flops=BLOCKS * (matrices + attention),
    )


NETWORK = twenty_billion()
LORA_SHARE = ADAPTER_IN_A_BLOCK * RANK / (IN_A_BLOCK * WIDTH)
H100 = Machine(
    gpus_a_node=8,
    memory=80 * GB,
    fast_link=450 * GB,
    network=50 * GB,
    link_efficiency=0.8,
    step_seconds=5e-6,
    flops=989e12,
    utilisation=0.4,
)
USABLE = 0.9  # of a GPU's memory: the rest is the driver's, NCCL's and lost between blocks
GPUS = (8, 64, 512)
SHARDS = (8, 16, 64, 512)


def plan(storage: str, ranks: int, shard_size: int, **changes: object) -> Plan:
    """A plan for the network above, with fused scores where they can be had."""
    scoring = "fused" if storage == "shared_base" else "separate"
    made = Plan(storage, scoring, ranks, shard_size, lora_share=LORA_SHARE)
    return replace(made, **changes)


def placements() -> Iterable[Plan]:
    """Both storages on every number of GPUs, in shards of every size."""
    for ranks in GPUS:
        for storage in ("independent", "shared_base"):
            for shard_size in (s for s in SHARDS if s <= ranks):
                yield plan(storage, ranks, shard_size)


def fits(found: Plan) -> bool:
    """Whether a rank's memory suffices."""
    return memory_bytes(NETWORK, found) <= USABLE * H100.memory


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; all but the first columns are numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def memory_table() -> str:
    """Memory of a rank by shard size: it does not depend on the number of replicas."""
    parts = (weight_bytes, optimizer_bytes, gradient_bytes, unit_bytes, activation_bytes)
    rows = []
    for storage in ("independent", "shared_base"):
        for size in SHARDS:
            one = plan(storage, size, size)
            numbers = [*(part(NETWORK, one) for part in parts), memory_bytes(NETWORK, one)]
            cells = [f"{n / GB:.1f}" for n in numbers]
            rows.append([f"`{storage}`", str(size), *cells, "yes" if fits(one) else "no"])
    head = ("storage", "F", "weights", "moments", "gradients", "units", "activations", "sum")
    return markdown((*head, "fits"), rows)


def variants_table() -> str:
    """What single settings change, in bytes: shared storage in shards of 8, one rank's."""
    base = plan("shared_base", 8, 8)
    cases = {
        "as above": base,
        "no `runtime.activation_checkpointing`": replace(base, recompute=False),
        "B = 2 in 2 micro-batches": replace(base, batch=2, micro_batches=2),
        "`method.score_batching: separate`": replace(base, scoring="separate"),
        "no `runtime.compute_dtype`": replace(base, gather_bytes=4),
    }
    rows = []
    for title, one in cases.items():
        gathered = gathered_bytes(NETWORK, expected_passes(one), one) / GB
        memory = memory_bytes(NETWORK, one) / GB
        rows.append([title, f"{memory:.1f}", f"{expected_passes(one):.1f}", f"{gathered:.0f}"])
    return markdown(("shared storage, F = 8", "memory, GB", "passes", "gathered, GB"), rows)


def time_table() -> str:
    """Time of a cycle's collectives and arithmetic, of what fits; one sample a rank and phase."""
    rows = []
    for one in filter(fits, placements()):
        talk = communication_seconds(NETWORK, one, H100)
        work = compute_seconds(NETWORK, one, H100)
        numbers = [
            f"{expected_passes(one):.1f}",
            f"{talk:.2f}",
            f"{work:.2f}",
            f"{talk / work:.2f}",
        ]
        rows.append([str(one.ranks), f"`{one.storage}`", str(one.shard_size), *numbers])
    head = ("GPUs", "storage", "F", "passes", "collectives, s", "arithmetic, s", "ratio")
    return markdown(head, rows, left=2)


def facts() -> dict[str, str]:
    """Numbers that the text names."""
    return {
        "parameters": f"{NETWORK.parameters / 1e9:.1f} billion",
        "unit": f"{NETWORK.largest_unit / 1e6:.0f} million",
        "forward": f"{NETWORK.flops / 1e12:.0f} TFLOP",
        "adapter": f"{100 * LORA_SHARE:.1f}%",
        "independent equivalents": f"{forward_equivalents(plan('independent', 8, 8)):.1f}",
        "shared equivalents": f"{forward_equivalents(plan('shared_base', 8, 8)):.1f}",
    }


if __name__ == "__main__":
    for found in (memory_table(), variants_table(), time_table()):
        print(found, end="\n\n")
    for name, fact in facts().items():
        print(f"{name}: {fact}")
