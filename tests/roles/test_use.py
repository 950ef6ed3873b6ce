"""Putting roles in force."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn

from fewstep.errors import TrainingError
from fewstep.models.module import ModuleModel
from fewstep.roles.role import Roles
from fewstep.roles.storage import Independent

X = torch.tensor([[0.3, -1.0], [0.1, 2.0]], dtype=torch.float64)
SIGMA = torch.tensor([0.2, 0.7], dtype=torch.float64)


def outputs(roles: Roles) -> dict[str, torch.Tensor]:
    found = {}
    for name in roles:
        with torch.no_grad(), roles.use(name) as denoiser:
            found[name] = denoiser(X, SIGMA, {}).output
    return found


def test_every_role_has_an_output_of_its_own(build_roles, point_model, storage) -> None:
    found = outputs(build_roles(point_model, storage))
    for (_, a), (_, b) in itertools.combinations(found.items(), 2):
        assert not torch.equal(a, b)


def test_use_nests_and_restores_the_outer_role(build_roles, point_model, storage) -> None:
    roles = build_roles(point_model, storage)
    alone = outputs(roles)
    with torch.no_grad(), roles.use("student") as student:
        with roles.use("fake_score") as fake_score:
            with roles.use("teacher_score") as teacher, roles.use("student") as again:
                assert torch.equal(again(X, SIGMA, {}).output, alone["student"])
            with roles.use("teacher_score") as teacher:
                assert torch.equal(teacher(X, SIGMA, {}).output, alone["teacher_score"])
            assert torch.equal(fake_score(X, SIGMA, {}).output, alone["fake_score"])
        assert torch.equal(student(X, SIGMA, {}).output, alone["student"])


@pytest.mark.parametrize("raises", [False, True])
def test_use_restores_role_and_grad_mode(build_roles, point_model, storage, raises) -> None:
    roles = build_roles(point_model, storage)
    alone = outputs(roles)
    for outer_grad in (True, False):
        with torch.set_grad_enabled(outer_grad):
            with roles.use("student") as student:
                with contextlib.suppress(ZeroDivisionError), roles.use("teacher_score"):
                    assert not torch.is_grad_enabled()
                    if raises:
                        raise ZeroDivisionError
                assert torch.is_grad_enabled() == outer_grad
                assert torch.equal(student(X, SIGMA, {}).output.detach(), alone["student"])
            assert torch.is_grad_enabled() == outer_grad


def test_an_exception_leaves_no_role_in_use(build_roles, point_model, storage) -> None:
    roles = build_roles(point_model, storage)
    with contextlib.suppress(ZeroDivisionError), roles.use("student") as kept:
        raise ZeroDivisionError
    with pytest.raises(TrainingError, match="while no role was in use"):
        kept(X, SIGMA, {})


class Dropping(nn.Module):
    """Drops everything in train mode; one part of it is in a mode of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.dropout = nn.Dropout(1.0)
        self.fixed = nn.Dropout(1.0)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.dropout(self.layers[1](self.layers[0](x))))


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_networks_run_in_eval_mode_and_get_their_mode_back(
    build_roles, storage, training, raises
) -> None:
    model = ModuleModel(Dropping, (2,))
    roles = build_roles(model, storage, targets=("0", "1"))
    for network in roles.storage.networks.values():
        network.train(training)
        network.get_submodule("fixed").eval()
    modes = [[m.training for m in network.modules()] for network in roles.storage.networks.values()]
    with contextlib.suppress(ZeroDivisionError), roles.use("student") as student:
        assert student(X, SIGMA, {}).output.abs().max() > 0
        with roles.use("fake_score") as fake_score:
            assert fake_score(X, SIGMA, {}).output.abs().max() > 0
        assert student(X, SIGMA, {}).output.abs().max() > 0
        if raises:
            raise ZeroDivisionError
    assert modes == [
        [m.training for m in network.modules()] for network in roles.storage.networks.values()
    ]


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("name", ["teacher_score", "student_ema"])
def test_a_frozen_role_never_records_gradients(
    build_roles, point_model, storage, name, where
) -> None:
    roles = build_roles(
        point_model, storage, names=("student", "fake_score", "teacher_score", "student_ema")
    )
    assert not any(p.requires_grad for p in roles[name].tensors)
    with torch.enable_grad(), roles.use("student"), roles.use(name) as denoiser:
        inner = torch.enable_grad() if where == "inside" else contextlib.nullcontext()
        x = X if where == "inside" else X.clone().requires_grad_()
        with inner:
            output = denoiser(x, SIGMA, {}).output
    assert not output.requires_grad
    with roles.use("student") as student:
        assert student(X, SIGMA, {}).output.requires_grad


def test_a_trained_role_records_none_where_the_caller_wants_none(
    build_roles, point_model, storage
) -> None:
    roles = build_roles(point_model, storage)
    with torch.no_grad(), roles.use("student") as student:
        assert not student(X, SIGMA, {}).output.requires_grad


@pytest.mark.parametrize("other", ["fake_score", "teacher_score", None])
def test_calling_a_role_while_another_is_in_use_is_an_error(
    build_roles, point_model, storage, other
) -> None:
    roles = build_roles(point_model, storage)
    with roles.use("student") as student:
        if other is not None:
            with roles.use(other), pytest.raises(TrainingError) as error:
                student(X, SIGMA, {})
            assert "'student'" in str(error.value)
            assert other in str(error.value)
        student(X, SIGMA, {})
    with pytest.raises(TrainingError, match="no role"):
        student(X, SIGMA, {})


def test_roles_can_be_printed(build_roles, point_model, storage) -> None:
    roles = build_roles(point_model, storage)
    roles["student"].successful, roles["student"].skipped = 7, 2
    lines = repr(roles).splitlines()
    assert [line.split(":")[0] for line in lines] == list(roles)
    student, _, teacher = lines
    for part in (f"{roles['student'].parameter_count:,} parameters", "AdamW", "7 updates", "2 sk"):
        assert part in student
    assert "frozen" in teacher
    assert ("adapter 'student'" in student) == (storage == "shared_base")


def test_two_roles_cannot_own_one_tensor(build_roles, point_model) -> None:
    network = point_model.build_network()
    shared = Independent({"student": network, "fake_score": network})
    with pytest.raises(TrainingError, match=r"student and fake_score both own 'layers\.0\.weight'"):
        Roles(point_model, shared, ["student", "fake_score"], {})
