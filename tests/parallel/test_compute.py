"""Recomputing and lower precision change how a network computes, not what."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fewstep.build import build_worker
from fewstep.data.dataset import Dataset
from fewstep.launch.local import train
from fewstep.parallel.compute import compute_in, recompute_in_backward
from fewstep.pretrained import load_weights, resolve_recipe


class Counting(nn.Linear):
    """Counts its forward passes."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_block_runs_twice_with_a_gradient_and_once_without() -> None:
    block, x = Counting(3, 3), torch.randn(2, 3)
    block(x).sum().backward()
    expected = block.weight.grad.clone()
    recompute_in_backward([block])
    block.zero_grad()
    block.calls = 0
    block(x).sum().backward()
    assert block.calls == 2
    assert torch.equal(block.weight.grad, expected)
    block.calls = 0
    with torch.no_grad():
        block(x)
    assert block.calls == 1


def test_a_copy_computes_with_weights_of_its_own() -> None:
    network = nn.Sequential(nn.Linear(2, 2))
    recompute_in_backward([network[0]])
    compute_in(network, torch.bfloat16, "cpu")
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied[0].weight.zero_()
        copied[0].bias.zero_()
    assert not network(torch.ones(1, 2)).eq(0).all()
    x = torch.ones(1, 2, requires_grad=True)
    assert copied(x).eq(0).all()
    assert network.state_dict().keys() == {"0.weight", "0.bias"}


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.LayerNorm(4, bias=False), nn.GroupNorm(2, 4)])
def test_a_norm_stands_weights_that_were_gathered_in_lower_precision(norm: nn.Module) -> None:
    network, x = nn.Sequential(norm), torch.randn(3, 4)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        rounded = copy.deepcopy(network).bfloat16().float()(x)
    compute_in(network.bfloat16(), torch.bfloat16, "cpu")
    for each in (network, copy.deepcopy(network)):
        torch.testing.assert_close(each(x), rounded, rtol=0, atol=0)
        torch.testing.assert_close(each[0](input=x), rounded, rtol=0, atol=0)


def test_bfloat16_is_close_and_keeps_weights_and_samples_in_float32(make_recipe, tmp_path) -> None:
    def losses(name: str, dtype: str | None) -> list[float]:
        found: list[float] = []
        recipe = make_recipe(
            "dmd2", {"runtime.compute_dtype": dtype, "run_dir": str(tmp_path / name)}
        )
        run = train(
            recipe, on_cycle=lambda cycle, results: found.extend(r.metrics["loss"] for r in results)
        )
        assert {p.dtype for r in run.roles.values() for p in r.tensors} == {torch.float32}
        assert run.sample(3).images.dtype == torch.float32
        return found

    full, half = losses("full", None), losses("half", "bfloat16")
    assert full != half
    assert torch.allclose(torch.tensor(half), torch.tensor(full), rtol=0.05)


def test_a_classifier_tells_apart_what_lower_precision_would_not(make_recipe) -> None:
    changes = {"runtime.compute_dtype": "bfloat16", "data.name": "custom"}
    changes |= {"method.adversarial": {}, "optimizers.discriminator": {"lr": 0.01}}
    recipe = resolve_recipe(make_recipe("dmd2", changes))
    model = recipe.model.build()
    images = Dataset(torch.randn(4, *model.sample_shape), torch.zeros(4, dtype=torch.int64))
    roles = build_worker(recipe, model, images, load_weights(recipe, model)).roles
    head, network = roles.head("discriminator", False), roles.storage.networks["discriminator"]
    tokens = torch.randn(2, 4, network.readers[0].norm.normalized_shape[0])
    moved, exact = tokens + 1e-3 * torch.randn_like(tokens), copy.deepcopy(network).double()
    found = (head(moved) - head(tokens)).double()
    expected = exact(moved.double()) - exact(tokens.double())
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-7)
