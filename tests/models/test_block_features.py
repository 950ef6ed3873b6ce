"""Features of blocks: which ones, how wide, and how their gradients go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.models.block_features import FeatureExtractor, feature_widths, select_blocks
from fewstep.models.classifier import ClassifierHead
from fewstep.models.dit import DiT
from fewstep.models.mixture import MixtureSettings
from fewstep.models.model import Denoiser, empty_network
from fewstep.models.module import ModuleModel


class Blocks(nn.Module):
    """Three blocks of widths 3, 5 and 7, and a way out that does not use the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 5), nn.Linear(5, 7)])
        self.leave = nn.Linear(5, 2)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        h = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        self.blocks[2](h)
        return self.leave(h)


def extractor(network: nn.Module, *names: str) -> FeatureExtractor:
    model = ModuleModel(Blocks, (2,))
    denoiser = Denoiser(model, network, lambda: None)
    return FeatureExtractor(denoiser, select_blocks(model, network, names or None))


def test_the_middle_block_is_the_default_and_widths_need_no_weights(dit_model: DiT) -> None:
    model = ModuleModel(Blocks, (2,))
    network = empty_network(Blocks)
    assert list(select_blocks(model, network, None)) == ["blocks.1"]
    assert feature_widths(model, network, ["blocks.2", "blocks.0"]) == [7, 3]
    assert all(p.is_meta for p in network.parameters())
    dit = empty_network(dit_model.build_network)
    assert list(dit_model.feature_blocks(dit)) == ["transformer_blocks.0", "transformer_blocks.1"]
    assert feature_widths(dit_model, dit, None) == [8]
    points = MixtureSettings(width=6, depth=3).build()
    teacher = points.build_network()
    assert feature_widths(points, points.student_network(teacher), None) == [6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_widths_are_found_in_the_dtype_of_the_weights(dit_model: DiT, dtype: torch.dtype) -> None:
    assert feature_widths(dit_model, dit_model.build_network().to(dtype), None) == [8]


def test_an_unknown_block_is_named_with_those_that_exist() -> None:
    model = ModuleModel(Blocks, (2,))
    with pytest.raises(UserError) as caught:
        select_blocks(model, Blocks(), ["blocks.1", "blocks.3"])
    assert str(caught.value) == (
        "method.adversarial.blocks: 'blocks.3' is not there; there are: blocks.0, blocks.1, "
        "blocks.2"
    )
    points = MixtureSettings().build()
    with pytest.raises(UserError, match="the middle block is not there; the network has no blocks"):
        select_blocks(points, points.build_network(), None)


def test_a_network_that_needs_numbers_is_refused_in_words() -> None:
    class Asks(Blocks):
        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return super().forward(x * float(sigma.max()), sigma)

    model = ModuleModel(Asks, (2,))
    with pytest.raises(UserError, match="meta device, which this network does not stand"):
        feature_widths(model, model.build_network(), None)


@pytest.mark.parametrize(
    ("shape", "tokens"), [((4, 3), (4, 1, 3)), ((4, 6, 3), (4, 6, 3)), ((4, 3, 2, 5), (4, 10, 3))]
)
def test_outputs_become_tokens(shape: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    model, output = ModuleModel(Blocks, (2,)), torch.arange(float(torch.Size(shape).numel()))
    found = model.block_features(output.reshape(shape))
    assert tuple(found.shape) == tokens
    if len(shape) == 4:
        assert torch.equal(found[1, 7], output.reshape(shape)[1, :, 1, 2])


def test_an_output_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(UserError, match=r"returns tuple, .*block_features must make tokens"):
        ModuleModel(Blocks, (2,)).block_features((torch.zeros(1), None))


def test_features_are_what_the_blocks_returned_and_hooks_are_gone() -> None:
    torch.manual_seed(0)
    network, x = Blocks().eval(), torch.randn(4, 2)
    with torch.no_grad():
        first, third = extractor(network, "blocks.0", "blocks.2")(x, torch.tensor(0.5), {})
        expected = network.blocks[0](x)
        assert torch.equal(first[:, 0], expected)
        h = torch.tanh(network.blocks[1](torch.tanh(expected)))
        assert torch.equal(third[:, 0], network.blocks[2](h))
    assert all(not block._forward_hooks for block in network.modules())


def test_gradients_pass_as_if_the_output_were_not_there_but_pass_by_it() -> None:
    torch.manual_seed(0)
    network, x = Blocks().eval(), torch.randn(4, 2)
    seen: list[Tensor] = []
    network.register_forward_hook(
        lambda module, args, output: output.register_hook(seen.append) and None
    )
    x.requires_grad_()
    (tokens,) = extractor(network, "blocks.0")(x, torch.tensor(0.5), {})
    (found,) = torch.autograd.grad(tokens.square().sum(), x)
    plain = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(network.blocks[0](plain).square().sum(), plain)
    torch.testing.assert_close(found, expected)
    assert [float(g.abs().max()) for g in seen] == [0.0]  # a sharded network hears of it here


def test_a_block_that_is_never_called_is_named() -> None:
    network = Blocks().eval()
    network.blocks.append(nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"the network never calls 'blocks\.3'"):
        extractor(network, "blocks.3")(torch.zeros(1, 2), torch.tensor(0.5), {})


def test_the_head_gives_one_logit_and_all_of_it_learns() -> None:
    torch.manual_seed(0)
    head = ClassifierHead([3, 5])
    assert head.leave.in_features == 5
    logits = head(torch.randn(4, 6, 3), torch.randn(4, 2, 5))
    assert logits.shape == (4, 1)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())
    assert ClassifierHead([3, 5], hidden=2).leave.in_features == 2
