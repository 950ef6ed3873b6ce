"""Who gets gradients, and what happens where the wrong one does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from fewstep.errors import TrainingError, UserError
from fewstep.models.module import ModuleModel
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import Roles


def loss_of(roles: Roles, name: str) -> Tensor:
    """Some loss of a role; call it, and its backward, with the role in use."""
    model = roles.model
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, *model.sample_shape, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    with roles.use(name) as denoiser:
        output = denoiser(x, sigma, model.example_condition(3)).output
        return ((output - 1) ** 2).sum()


def gradients_of(roles: Roles, name: str) -> dict[str, Tensor]:
    return {k: p.grad.clone() for k, p in roles[name].parameters.items() if p.grad is not None}


def clear(roles: Roles) -> None:
    for role in roles.values():
        for parameter in role.tensors:
            parameter.grad = None


@pytest.fixture(params=["point", "dit"])
def model(request, point_model, dit_model):
    return point_model if request.param == "point" else dit_model


@pytest.mark.parametrize("name", ["student", "fake_score"])
def test_only_the_active_role_gets_gradients(build_roles, model, storage, name) -> None:
    roles = build_roles(model, storage)
    with roles.use(name):
        loss_of(roles, name).backward()
    roles.check_gradients(name)
    for other in roles.values():
        present = [p.grad is not None for p in other.tensors]
        assert all(present) if other.name == name else not any(present)


def test_base_weights_get_no_gradient_in_shared_storage(build_roles, dit_model) -> None:
    roles = build_roles(dit_model, "shared_base")
    with roles.use("student"):
        loss_of(roles, "student").backward()
    with_gradient = {
        k for k, p in roles.storage.networks["base"].named_parameters() if p.grad is not None
    }
    assert with_gradient == set(roles["student"].parameters)


@pytest.mark.parametrize("other", ["fake_score", "teacher_score"])
def test_a_leaked_gradient_is_an_error(build_roles, point_model, storage, other) -> None:
    roles = build_roles(point_model, storage)
    with roles.use("student"):
        loss_of(roles, "student").backward()
    key, parameter = next(iter(roles[other].parameters.items()))
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(TrainingError) as error:
        roles.check_gradients("student")
    assert other in str(error.value)
    assert key in str(error.value)


def test_missing_gradients_are_an_error(build_roles, point_model, storage) -> None:
    roles = build_roles(point_model, storage)
    with pytest.raises(TrainingError, match="gave no gradient to 4 of its 4 tensors"):
        roles.check_gradients("student")
    with roles.use("student"):
        loss_of(roles, "student").backward()
    key, parameter = next(iter(roles["student"].parameters.items()))
    parameter.grad = None
    with pytest.raises(TrainingError) as error:
        roles.check_gradients("student")
    assert "1 of its 4" in str(error.value)
    assert key in str(error.value)
    assert "unused_parameters" in str(error.value)


def test_parameters_known_to_be_unused_may_lack_gradients(build_roles, point_model) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return self.used(x)

    for unused, fine in (((), False), (("spare",), True), (("used.bias",), False)):
        optimizer = OptimizerSettings(lr=1e-3, unused_parameters=unused)
        roles = build_roles(ModuleModel(Unused, (2,)), "independent", optimizer=optimizer)
        with roles.use("student"):
            loss_of(roles, "student").backward()
        if fine:
            roles.check_gradients("student")
        else:
            with pytest.raises(TrainingError, match=r"spare\.weight, spare\.bias"):
                roles.check_gradients("student")


@pytest.mark.parametrize("other", ["fake_score", "teacher_score"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_backward_while_another_role_is_in_use_is_an_error(
    build_roles, dit_model, storage, checkpointing, other
) -> None:
    roles = build_roles(dit_model, storage)
    if checkpointing:
        roles.storage.module("student").enable_gradient_checkpointing()
    with roles.use("student"):
        loss = loss_of(roles, "student")
        with roles.use(other), torch.enable_grad():
            with pytest.raises(TrainingError) as error:
                loss.backward()
            assert f"student was run while {other} was in use" in str(error.value)
        assert not gradients_of(roles, "student")


def test_set_adapter_of_peft_is_caught(build_roles, point_model) -> None:
    """PEFT's own switch makes the other adapter trainable instead."""
    roles = build_roles(point_model, "shared_base")
    with roles.use("student"):
        for layer in roles.storage.networks["base"].modules():
            if hasattr(layer, "set_adapter"):
                layer.set_adapter("fake_score")
        assert not loss_of(roles, "student").requires_grad
    with pytest.raises(TrainingError, match="no gradient"):
        roles.check_gradients("student")


def test_checkpointed_layers_give_the_same_gradients(build_roles, dit_model, storage) -> None:
    roles = build_roles(dit_model, storage)
    with roles.use("student"):
        loss_of(roles, "student").backward()
    expected = gradients_of(roles, "student")
    clear(roles)
    roles.storage.module("student").enable_gradient_checkpointing()
    with roles.use("student"):
        loss = loss_of(roles, "student")
        # The same network is run as the others before the student's backward.
        for other in ("fake_score", "teacher_score"):
            with torch.no_grad(), roles.use(other):
                loss_of(roles, other)
        loss.backward()
    roles.check_gradients("student")
    found = gradients_of(roles, "student")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class Checkpointed(nn.Module):
    """A perceptron with one checkpointed layer, of either kind."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 4), nn.Linear(4, 2)])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        middle = torch.tanh(self.layers[0](x))
        if self.use_reentrant is None:
            return self.layers[1](middle)
        output: Tensor = checkpoint(self.layers[1], middle, use_reentrant=self.use_reentrant)
        return output


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_torch_gives_the_same_gradients(build_roles, storage, use_reentrant) -> None:
    found = []
    for kind in (None, use_reentrant):
        model = ModuleModel(partial(Checkpointed, kind), (2,))
        roles = build_roles(model, storage, targets=("0", "1"))
        with roles.use("student"):
            loss_of(roles, "student").backward()
        roles.check_gradients("student")
        found.append(gradients_of(roles, "student"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_backward_after_leaving_the_role_is_an_error(
    build_roles, use_reentrant
) -> None:
    model = ModuleModel(partial(Checkpointed, use_reentrant), (2,))
    roles = build_roles(model, "shared_base", targets=("0", "1"))
    loss = loss_of(roles, "student")
    with pytest.raises((TrainingError, CheckpointError)):  # noqa: PT012 (either may find it)
        loss.backward()
        roles.check_gradients("student")


def test_parameters_said_to_be_unused_are_left_as_they_are(build_roles, point_model) -> None:
    optimizer = OptimizerSettings(lr=1e-3, weight_decay=0.1, unused_parameters=("layers.0",))
    roles = build_roles(point_model, "independent", optimizer=optimizer)
    student = roles["student"]
    trained = {k for k, p in student.parameters.items() if p.requires_grad}
    assert trained == {"layers.2.weight", "layers.2.bias"}
    assert sum(len(g["params"]) for g in student.optimizer.param_groups) == 2


def test_a_name_of_nothing_is_refused(build_roles, point_model) -> None:
    optimizer = OptimizerSettings(lr=1e-3, unused_parameters=("layers.9",))
    with pytest.raises(UserError, match=r"unused_parameters: 'layers\.9' is part of no name"):
        build_roles(point_model, "independent", optimizer=optimizer)
