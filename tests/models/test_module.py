from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fewstep.diffusion.paths import EDM, RectifiedFlow
from fewstep.errors import UserError
from fewstep.models.module import ModuleModel, ModuleSettings


class Small(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(2, width)
        self.out = nn.Linear(width, 2)
        self.dropout = nn.Dropout(0.5)
        self.timesteps: list[Tensor] = []

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        self.timesteps.append(timestep)
        return self.out(self.dropout(self.layer(x))) + timestep[:, None]


X = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))


def test_a_new_network_is_in_eval_mode() -> None:
    assert not ModuleModel(Small, (2,)).build_network().training


@pytest.mark.parametrize("path", [None, RectifiedFlow(1000.0), EDM()], ids=repr)
def test_the_network_is_told_the_paths_timestep(path: RectifiedFlow | EDM | None) -> None:
    model = ModuleModel(Small, (2,), path=path)
    network, sigma = model.build_network(), torch.tensor([0.25, 0.5, 1.0])
    output = model.forward(network, X, sigma, {})
    told = {
        "NoneType": sigma,
        "RectifiedFlow": 1000 * sigma,
        "EDM": torch.log(80 * sigma**7) / 4,
    }[type(path).__name__]
    assert isinstance(network, Small)
    torch.testing.assert_close(network.timesteps[0], told)
    torch.testing.assert_close(output, network(X, told))


def test_guidance_needs_a_null_label() -> None:
    labels = {"class_labels": torch.tensor([0, 1, 2]), "strength": torch.ones(3)}
    plain = ModuleModel(Small, (2,), classes=5)
    assert not plain.supports_guidance
    with pytest.raises(ValueError, match="no unconditional prediction"):
        plain.unconditional(labels)
    guided = ModuleModel(Small, (2,), classes=5, null_label=5)
    assert guided.supports_guidance
    none = guided.unconditional(labels)
    assert none["class_labels"].tolist() == [5, 5, 5]
    assert none["strength"] is labels["strength"]
    assert labels["class_labels"].tolist() == [0, 1, 2]


def test_weights_round_trip(tmp_path: Path) -> None:
    model = ModuleModel(Small, (2,))
    network = model.build_network()
    model.save_network(network, tmp_path / "new" / "folder")
    loaded = model.load_network(tmp_path / "new" / "folder")
    assert not loaded.training
    assert loaded.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in loaded.state_dict().items())


def test_missing_truncated_and_unfitting_weights_name_their_file(tmp_path: Path) -> None:
    model = ModuleModel(Small, (2,))
    with pytest.raises(UserError, match=r"nowhere/model\.safetensors"):
        model.load_network(tmp_path / "nowhere")
    model.save_network(model.build_network(), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors is corrupt or truncated"):
        model.load_network(tmp_path)
    file.write_bytes(whole)
    with pytest.raises(UserError, match=r"safetensors does not fit the network: .*\n.*layer"):
        ModuleModel(lambda: Small(7), (2,)).load_network(tmp_path)


def test_a_recipe_alone_cannot_make_a_module() -> None:
    with pytest.raises(UserError, match=r"as in fewstep\.train"):
        ModuleSettings().build()
