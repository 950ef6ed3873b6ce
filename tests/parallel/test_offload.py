"""What a rank holds goes to main memory and comes back, and a run does not notice."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.ranks import on_ranks
from fewstep.build import build_worker
from fewstep.config import parse_recipe
from fewstep.errors import TrainingError
from fewstep.parallel.offload import CHUNK_BYTES, Moved, Offload, held_tensors
from fewstep.parallel.ranks import SINGLE, Ranks
from fewstep.pretrained import load_weights, resolve_recipe
from fewstep.training.cycle import CycleSettings, plan_cycle
from fewstep.training.worker import Worker

CPU = torch.device("cpu")
STORAGES = ("independent", "shared_base")
CASES = tuple(product(("ddp", "fsdp1", "fsdp2"), STORAGES))
OPTIMIZER = {"lr": 0.01, "betas": [0.5, 0.9]}


def make_worker(storage: str, kind: str = "none", ranks: Ranks = SINGLE) -> Worker:
    """A worker over tiny networks in float64, with all four roles."""
    values: dict[str, Any] = {
        "seed": 3,
        "run_dir": "unused",
        "storage": storage,
        "model": {
            "family": "dit",
            "network": {
                "sample_size": 4,
                "patch_size": 2,
                "num_layers": 2,
                "num_attention_heads": 1,
                "attention_head_dim": 8,
                "num_embeds_ada_norm": 3,
            },
        },
        "method": {"name": "dmd2", "steps": 2, "fake_updates_per_student": 2, "guidance": 2.0},
        "optimizers": {"student": OPTIMIZER, "fake_score": OPTIMIZER},
        "train": {"cycles": 2, "batch_size": 4},
        "ema": {"decay": 0.7},
        "runtime": {"dtype": "float64"},
        "parallel": {"kind": kind},
        **({"lora": {"rank": 2}} if storage == "shared_base" else {}),
    }
    recipe = resolve_recipe(parse_recipe(values))
    model = recipe.model.build()
    return build_worker(recipe, model, None, load_weights(recipe, model, ranks), ranks)


def offload_of(worker: Worker) -> Offload:
    return Offload(CPU, lambda: held_tensors(worker.roles, worker.sharding))


def train(worker: Worker, between: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
    """Losses of two cycles and all state after them, on this rank."""
    losses = []
    for cycle in (1, 2):
        for request in plan_cycle(cycle, 2, CycleSettings()):
            between()
            losses.append(worker.run_phase(request).metrics["loss"])
    between()
    return {"losses": torch.tensor(losses, dtype=torch.float64), **whole_state(worker)}


def whole_state(worker: Worker) -> dict[str, Tensor]:
    state = worker.state_dict()
    return {
        f"{section}/{name}/{key}": (
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        ).clone()
        for section in ("networks", "optimizers")
        for name, tensors in state[section].items()
        for key, tensor in tensors.items()
    }


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [key for key, value in left.items() if not torch.equal(value, right[key])]


def settled_bytes() -> int:
    """`live_bytes` once nothing more is let go by itself, as by threads that communicate."""
    before, now = -1, live_bytes()
    while now != before:
        time.sleep(0.2)
        before, now = now, live_bytes()
    return now


def live_bytes() -> int:
    """Bytes of all tensors that Python knows of, but for main memory that is kept for naps."""
    while gc.collect():  # what one pass lets go may have held more
        pass
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not isinstance(thing, DTensor):
            storage = thing.untyped_storage()
            if storage.device == CPU and storage.nbytes() != CHUNK_BYTES:
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def observe_all(ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Be one rank: what was seen, of all cases."""
    logging.getLogger("fewstep").setLevel(logging.ERROR)
    # All are kept to the end: what dies late would be missed from the count of another.
    kept: list[Worker] = []
    return {f"{kind}-{storage}": observe(kind, storage, ranks, kept) for kind, storage in CASES}


def observe(kind: str, storage: str, ranks: Ranks, kept: list[Worker]) -> dict[str, Any]:
    """Train twice, with naps and without."""
    kept.append(make_worker(storage, kind, ranks))
    plain = train(kept[-1])
    others = settled_bytes()
    worker = make_worker(storage, kind, ranks)
    kept.append(worker)
    offload = offload_of(worker)
    sizes: list[list[int]] = []
    changed = differing(plain, train(worker, napping(offload, sizes)))
    awake = settled_bytes()
    moved = offload.sleep().bytes
    asleep = settled_bytes()
    offload.wake()
    return {
        "changed": changed,
        "changed by a last nap": differing(plain, {**plain, **whole_state(worker)}),
        "sizes": sizes,
        "moved": moved,
        "fell": awake - asleep,
        "left": asleep - others,
    }


def napping(offload: Offload, sizes: list[list[int]]) -> Callable[[], None]:
    """Sleep and wake, and note (resident, offloaded) bytes before, between and after."""

    def nap() -> None:
        noted = [offload.resident_bytes, offload.offloaded_bytes]
        offload.sleep()
        noted += [offload.resident_bytes, offload.offloaded_bytes]
        offload.wake()
        sizes.append([*noted, offload.resident_bytes, offload.offloaded_bytes])

    return nap


@pytest.fixture(scope="session")
def seen() -> list[dict[str, Any]]:
    """What each of two ranks saw, of all cases."""
    return on_ranks(observe_all)


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"{kind}-{storage}" for kind, storage in CASES])
def test_a_sharded_run_does_not_notice(seen, case) -> None:
    for rank in seen:
        found = rank[case]
        assert found["changed"] == found["changed by a last nap"] == []
        for held, *rest in found["sizes"]:
            assert held > 0
            assert rest == [0, 0, held, held, 0]
        assert found["moved"] == found["sizes"][-1][0]
        # Of all tensors that there are, and not only of those that it was told of.
        assert found["fell"] == found["moved"]
        assert found["left"] < 100
    # The moments of two roles appeared on the way, on those ranks that hold their weights.
    first, second, third, *later = [
        sum(noted[0] for noted in both)
        for both in zip(*(rank[case]["sizes"] for rank in seen), strict=True)
    ]
    assert first < second < third
    assert set(later) == {third}


@pytest.mark.slow
def test_ranks_hold_their_parts_alone(seen) -> None:
    for storage in STORAGES:
        # Moments of the frozen base would show here, and gradients of it.
        whole = seen[0][f"ddp-{storage}"]["moved"]
        for kind in ("fsdp1", "fsdp2"):
            parts = sum(rank[f"{kind}-{storage}"]["moved"] for rank in seen)
            assert whole * 0.98 < parts < whole * 1.02


@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_does_not_notice(storage) -> None:
    plain = train(make_worker(storage))
    worker = make_worker(storage)
    sizes: list[list[int]] = []
    moved = train(worker, napping(offload_of(worker), sizes))
    assert differing(plain, moved) == []

    def size(tensors: list[Any]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    networks = worker.roles.storage.networks.values()
    weights = size([t for n in networks for t in (*n.parameters(), *n.buffers())])
    student = size(worker.roles["student"].tensors)
    # float64 moments, two of each; a step count in float32 for every tensor.
    state = 2 * student + 4 * len(worker.roles["student"].tensors)
    held = [noted[0] for noted in sizes]
    assert held == [weights, weights + state] + [weights + 2 * state] * 5
    for now, *rest in sizes:
        assert rest == [0, 0, now, now, 0]


def test_again_is_nothing() -> None:
    worker = make_worker("independent")
    offload = offload_of(worker)
    held = offload.resident_bytes
    assert offload.wake().bytes == 0
    assert not offload.asleep
    offload.require_awake("a phase")
    assert offload.sleep().bytes == held
    assert offload.sleep() == Moved(0, 0.0)
    assert offload.asleep
    assert offload.offloaded_bytes == held
    with pytest.raises(TrainingError, match=r"a phase needs the weights.*wake"):
        offload.require_awake("a phase")
    moved = offload.wake()
    assert moved.bytes == held
    assert moved.seconds > 0
    assert offload.wake() == Moved(0, 0.0)


def test_a_network_asleep_refuses() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(1, 2, 2), nn.LayerNorm(3))
    offload = Offload(CPU, lambda: network.parameters())
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x = torch.ones(2, 1, 3)
    expected = network(x)
    network(x).sum().backward()
    offload.sleep()
    for layer, shape in zip(network, ((2, 3), (2, 1, 4), (2, 3)), strict=True):
        with pytest.raises(RuntimeError, match=r"not allocated|out of bounds"):
            layer(torch.ones(shape))
    with pytest.raises(RuntimeError, match="not allocated"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        network[0].weight.detach().zero_()
    offload.wake()
    assert torch.equal(network(x), expected)
    optimizer.step()
    assert not torch.equal(network(x), expected)


def borrow(kind: str, path: Path) -> Tensor:
    """Six numbers, 0 to 5, in a storage that does not own its memory."""
    numbers = torch.arange(6.0)
    if kind == "safetensors":
        save_file({"weight": numbers}, path)
        return load_file(path)["weight"]
    if kind == "numpy":
        return torch.from_numpy(numpy.arange(6, dtype=numpy.float32))
    if kind == "mmap":
        path.write_bytes(numbers.numpy().tobytes())
        return torch.from_file(str(path), shared=True, size=6)
    return numbers.share_memory_()


@pytest.mark.parametrize("kind", ["safetensors", "numpy", "mmap", "shared"])
def test_borrowed_memory_becomes_its_own(kind, tmp_path) -> None:
    loaded = borrow(kind, tmp_path / "weights")
    network = nn.Linear(3, 2, bias=False)
    network.weight = nn.Parameter(loaded.view(2, 3))
    view = loaded[4:]
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    offload = Offload(CPU, lambda: [view])
    for _ in range(2):
        assert offload.sleep().bytes == 24
        assert loaded.untyped_storage().nbytes() == 0
        offload.wake()
    assert torch.equal(network.weight, torch.arange(6.0).view(2, 3))
    assert loaded.untyped_storage().resizable()
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert loaded.tolist() == [-1, 0, 1, 2, 3, 4]
    assert view.tolist() == [3, 4]


def test_autograd_does_not_notice() -> None:
    weight = nn.Parameter(torch.ones(3))
    offload = Offload(CPU, lambda: [weight])
    version = weight._version
    loss = (weight * weight).sum()
    offload.sleep()
    offload.wake()
    loss.backward()
    assert weight.grad.tolist() == [2, 2, 2]
    assert weight._version == version
    assert weight.is_leaf


def test_a_storage_is_moved_whole_and_once() -> None:
    whole = torch.arange(8.0)
    middle, others = whole[2:4], torch.arange(3, dtype=torch.int8)
    offload = Offload(CPU, lambda: [middle, whole.view(2, 4).T, others, torch.empty(0)])
    assert offload.resident_bytes == 35
    assert offload.sleep().bytes == 35
    offload.wake()
    assert whole.tolist() == list(range(8))
    assert others.tolist() == [0, 1, 2]


def test_what_is_elsewhere_is_left_alone() -> None:
    here, meta = torch.ones(3), torch.ones(3, device="meta")
    offload = Offload(CPU, lambda: [here, meta])
    assert offload.sleep().bytes == 12
    offload.wake()
    other = Offload(torch.device("meta"), lambda: [here])
    assert other.sleep().bytes == other.resident_bytes == 0
    assert here.tolist() == [1, 1, 1]


def test_longer_than_a_chunk() -> None:
    count = CHUNK_BYTES // 8
    tensors = [torch.arange(n) for n in (3, count + 5, 2 * count + 1, 2)]
    offload = Offload(CPU, lambda: tensors)
    offload.sleep()
    offload.wake()
    for tensor in tensors:
        assert torch.equal(tensor, torch.arange(len(tensor)))


def test_memory_falls() -> None:
    # Large enough for the allocator to return each piece to the system at once.
    network = nn.ParameterList(torch.ones(10_000_000) for _ in range(5))
    offload = Offload(CPU, network.parameters)
    offload.sleep()
    offload.wake()
    # From now on main memory is kept, and counts in both.
    process = psutil.Process()
    awake = process.memory_info().rss
    assert offload.sleep().bytes == 200_000_000
    assert awake - process.memory_info().rss > 160_000_000
    offload.wake()
    assert process.memory_info().rss > awake - 40_000_000


def test_gradients_are_moved_where_there_are_any() -> None:
    worker = make_worker("independent")
    offload = offload_of(worker)
    held = offload.resident_bytes
    weight = worker.roles["student"].tensors[0]
    weight.grad = torch.full_like(weight, 2.0)
    moved = offload.sleep().bytes
    offload.wake()  # first: to show a tensor that is asleep is to read it
    assert moved == held + weight.numel() * 8
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


def test_what_a_checkpoint_replaces_is_let_go() -> None:
    worker = make_worker("shared_base")
    offload = offload_of(worker)
    train(worker, lambda: (offload.sleep(), offload.wake()))
    held, before = offload.resident_bytes, settled_bytes()
    state = worker.state_dict()
    saved = {
        part: {n: {k: t.clone() for k, t in ts.items()} for n, ts in state[part].items()}
        for part in ("networks", "optimizers")
    }
    worker.load_state_dict({**saved, "counters": state["counters"]})
    del state, saved
    assert offload.resident_bytes == held
    assert settled_bytes() == before
    assert offload.sleep().bytes == held
    assert before - settled_bytes() == held
    offload.wake()
