"""Networks get their weights a part at a time, and each value once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import final

import pytest
import torch
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.models.model import empty_network, pretrained
from fewstep.parallel.materialize import Filler
from fewstep.parallel.ranks import SINGLE
from fewstep.parallel.sharding import Replicated, spread
from fewstep.roles.storage import LoraSettings, build_independent, build_shared_base


@final
class Recorder(Mapping[str, Tensor]):
    """Weights that remember what was asked of them, in order."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.read: list[str] = []

    def __getitem__(self, key: str) -> Tensor:
        self.read.append(key)
        return self.weights[key]

    def __contains__(self, key: object) -> bool:
        return key in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def same(key: str) -> str:
    return key


class Tied(nn.Module):
    """Two layers with one weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("scratch", torch.arange(4), persistent=False)


def test_taken_apart_and_filled_is_the_same_network() -> None:
    network = Tied()
    apart = pretrained(network)
    assert all(p.is_meta for p in apart.network.parameters())
    weights = Recorder(apart.weights)
    Filler(SINGLE, torch.float64, weights, same).fill(apart.network)
    assert weights.read == ["a.weight", "a.bias"]
    assert apart.network.b.weight is apart.network.a.weight
    for key, value in network.state_dict().items():
        filled = apart.network.state_dict()[key]
        assert filled.dtype == torch.float64
        assert torch.equal(filled, value.double())
        assert filled.data_ptr() != value.data_ptr()
    assert apart.network.scratch.dtype == torch.int64


class TiedByHand(nn.Module):
    """One parameter under two names, without a module in between."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(2))
        self.a, self.b = weight, weight


@pytest.mark.parametrize("make", [Tied, TiedByHand])
def test_an_empty_network_has_the_structure_of_a_real_one(make) -> None:
    real, empty = make(), empty_network(make)
    assert list(empty.state_dict()) == list(real.state_dict())
    assert [k for k, _ in empty.named_parameters()] == [k for k, _ in real.named_parameters()]
    assert all(p.is_meta for p in empty.parameters())
    for (key, buffer), (_, other) in zip(empty.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(buffer, other), key
    assert not any(p.is_meta for p in make().parameters())


def test_a_block_is_filled_before_the_rest_and_left_alone_after() -> None:
    apart = pretrained(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    weights = Recorder(apart.weights)
    filler = Filler(SINGLE, torch.float32, weights, same)
    filler.fill(apart.network[1], "1.")
    assert weights.read == ["1.weight", "1.bias"]
    assert apart.network[0].weight.is_meta
    filler.close(apart.network[1])
    block = apart.network[1].weight
    filler.fill(apart.network)
    assert weights.read == ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert apart.network[1].weight is block


def test_what_has_been_sharded_is_not_kept_whole() -> None:
    apart = pretrained(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    filler = Filler(SINGLE, torch.float32, apart.weights, same)
    filler.fill(apart.network[1], "1.")
    whole = weakref.ref(apart.network[1].weight)
    apart.network[1].weight = nn.Parameter(torch.zeros(1, 2))  # a shard of it
    filler.close(apart.network[1])
    gc.collect()
    assert whole() is None
    filler.fill(apart.network)


def test_frozen_stays_frozen() -> None:
    network = nn.Linear(2, 2)
    network.weight.requires_grad_(False)
    apart = pretrained(network)
    Filler(SINGLE, torch.float32, apart.weights, same).fill(apart.network)
    assert not apart.network.weight.requires_grad
    assert apart.network.bias.requires_grad


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"weight": torch.zeros(2, 2)}, r"there is no tensor 'bias'"),
        (
            {"weight": torch.zeros(2, 2), "bias": torch.zeros(3)},
            r"'bias' has shape \(3,\), the network needs \(2,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(weights, text) -> None:
    apart = pretrained(nn.Linear(2, 2))
    with pytest.raises(UserError, match=text):
        Filler(SINGLE, torch.float32, weights, same).fill(apart.network)


def test_without_weights_there_is_memory_only() -> None:
    apart = pretrained(nn.Linear(2, 2))
    Filler(SINGLE, torch.float64, None, same).fill(apart.network)
    assert apart.network.weight.device == SINGLE.device
    assert apart.network.weight.dtype == torch.float64


def test_adapters_have_the_values_that_they_have_on_a_real_base(dit_model) -> None:
    states = []
    for apart in (False, True):
        torch.manual_seed(7)
        base = dit_model.build_network()
        source = pretrained(base)
        storage = build_shared_base(
            dit_model,
            source.network if apart else base,
            ["student", "fake_score"],
            LoraSettings(rank=2),
        )
        spread(storage, Replicated(), dit_model.blocks, source.weights, dtype=torch.float64)
        states.append(storage.tensors["base"])
    real, meta = states
    assert real.keys() == meta.keys()
    assert all(torch.equal(value, meta[key]) for key, value in real.items())


def test_every_network_of_its_own_gets_the_teachers_values(dit_model) -> None:
    apart = pretrained(dit_model.build_network())
    storage = build_independent(dit_model, apart.network, ("teacher_score", "student"))
    spread(storage, Replicated(), dit_model.blocks, apart.weights, dtype=torch.float32)
    for name in ("teacher_score", "student"):
        for key, value in apart.weights.items():
            assert torch.equal(storage.tensors[name][key], value)
    student, teacher = (storage.parameters(n) for n in ("student", "teacher_score"))
    assert not {id(p) for p in student.values()} & {id(p) for p in teacher.values()}
