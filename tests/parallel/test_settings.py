"""Combinations that cannot work are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fewstep.build import check_ranks
from fewstep.errors import UserError
from fewstep.launch.local import train
from fewstep.models.module import ModuleModel
from fewstep.parallel.fully_sharded import check_shardable, separate_blocks
from fewstep.parallel.ranks import CPU, Ranks
from fewstep.parallel.settings import ParallelSettings
from fewstep.parallel.sharding import build_sharding


@pytest.mark.parametrize("kind", ["none", "ddp"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("shard_size", 2), ("cpu_offload", True), ("reduce_each_micro_batch", True)],
)
def test_options_of_sharding_need_sharding(make_recipe, kind, key, value) -> None:
    with pytest.raises(
        UserError, match=rf"{key}: only for kind 'fsdp1' or 'fsdp2'.*kind is '{kind}'"
    ):
        make_recipe("dmd2", {"parallel.kind": kind, f"parallel.{key}": value})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel.kind": "fsdp3"}, r"parallel\.kind: 'fsdp3'"),
        ({"parallel.use_orig_params": False}, r"parallel\.use_orig_params: there is no such key"),
        ({"launch.processes": 0}, r"launch\.processes: 0"),
        ({"launch.processes": True}, r"launch\.processes: True"),
        (
            {"runtime.compute_dtype": "bfloat16", "runtime.dtype": "float64"},
            r"compute_dtype: 'bfloat16' would throw away what dtype 'float64' is for",
        ),
    ],
)
def test_other_impossible_values(make_recipe, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        make_recipe("dmd2", changes)


def test_the_shards_must_divide_the_ranks() -> None:
    settings = ParallelSettings(kind="fsdp2", shard_size=3)
    with pytest.raises(UserError, match=r"shard_size: 3 does not divide the 4 ranks"):
        build_sharding(settings, Ranks(0, 4, CPU, True), None)


def test_fsdp1_offloads_from_an_accelerator_only() -> None:
    settings = ParallelSettings(kind="fsdp1", cpu_offload=True)
    with pytest.raises(UserError, match=r"cpu_offload: fsdp1 offloads from an accelerator"):
        build_sharding(settings, Ranks(0, 2, CPU, True), None)


def test_ranks_that_do_not_fit_the_recipe(make_recipe) -> None:
    check_ranks(make_recipe("dmd2", {"launch.processes": 2}), Ranks(0, 2, CPU, True))
    with pytest.raises(
        UserError, match=r"launch\.processes: 3 is given, but there are 2 processes"
    ):
        check_ranks(make_recipe("dmd2", {"launch.processes": 3}), Ranks(0, 2, CPU, True))
    with pytest.raises(UserError, match=r"train\.batch_size: 4 is given for 5 ranks"):
        check_ranks(make_recipe(), Ranks(0, 5, CPU, True))


def test_python_cannot_start_processes(make_recipe) -> None:
    with pytest.raises(UserError, match=r"launch\.processes: 2 is given, but there are 1 process"):
        train(make_recipe("dmd2", {"launch.processes": 2}))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_single_number_cannot_be_sharded(kind) -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

    with pytest.raises(UserError, match=rf"kind: '{kind}' cannot cut 'gain' into shards"):
        check_shardable(Gain(), kind)
    check_shardable(nn.Linear(1, 1), kind)


def test_blocks_that_share_a_weight_are_left_to_the_root() -> None:
    network = nn.Module()
    network.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    network.head = nn.Linear(2, 2)
    network.head.weight = network.blocks[1].weight
    network.blocks[3].weight = network.blocks[2].weight
    model = ModuleModel(lambda: network, (2,))
    assert list(model.blocks(network)) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert list(separate_blocks(network, model.blocks)) == ["blocks.0"]
    twice = nn.Module()
    twice.blocks = nn.ModuleList([nn.Linear(2, 2)] * 2)
    assert separate_blocks(twice, model.blocks) == {}
