"""Where weights live."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fewstep.errors import UserError
from fewstep.models.module import ModuleModel
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import Roles
from fewstep.roles.storage import LoraSettings, build_independent, build_shared_base

ALL = ("student", "fake_score", "teacher_score", "student_ema")


@pytest.fixture(params=["point", "dit"])
def model(request, point_model, dit_model):
    return point_model if request.param == "point" else dit_model


def inputs(model):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, *model.sample_shape, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([0.1, 0.6, 1.0], dtype=torch.float64)
    return x, sigma, model.example_condition(3)


def test_parameter_sets_are_disjoint_and_not_empty(build_roles, model, storage) -> None:
    roles = build_roles(model, storage, ALL)
    sets = {name: {id(p) for p in role.tensors} for name, role in roles.items()}
    assert all(sets.values())
    for a, b in itertools.combinations(sets, 2):
        assert sets[a].isdisjoint(sets[b]), (a, b)
    physical = {id(p) for n in roles.storage.networks.values() for p in n.parameters()}
    assert set().union(*sets.values()) == physical


def test_each_optimizer_holds_its_roles_tensors_alone(build_roles, model, storage) -> None:
    roles = build_roles(model, storage, ALL)
    for name in ("student", "fake_score"):
        held = [p for group in roles[name].optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in roles[name].tensors}
        assert len(held) == len(roles[name].tensors)
    assert roles["teacher_score"].optimizer is None
    assert roles["student_ema"].optimizer is None


def test_sets_are_right_just_after_injection_when_all_adapters_are_trainable(dit_model) -> None:
    base = dit_model.build_network()
    own = {id(p) for p in base.parameters()}
    shared = build_shared_base(dit_model, base, ["student", "fake_score"], LoraSettings(rank=2))
    adapters = {n: list(shared.parameters(n).values()) for n in ("student", "fake_score")}
    for parameters in adapters.values():
        assert parameters
        assert all(p.requires_grad for p in parameters)
    everything = {id(p) for parameters in adapters.values() for p in parameters}
    assert everything.isdisjoint(own)
    assert len(everything) == sum(map(len, adapters.values()))
    assert {id(p) for p in shared.parameters("teacher_score").values()} == own
    assert not any(p.requires_grad for p in shared.parameters("teacher_score").values())


class NamedLikeRoles(nn.Module):
    """Its modules have the names of roles."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(2, 4)
        self.fake_score = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.fake_score(self.student(x))


def test_modules_named_like_roles_are_not_taken_for_adapters(build_roles) -> None:
    model = ModuleModel(NamedLikeRoles, (2,))
    roles = build_roles(model, "shared_base", targets=("student", "fake_score"))
    assert len(roles["teacher_score"].tensors) == 4
    for name in ("student", "fake_score"):
        assert sorted(roles[name].parameters) == sorted(
            f"{module}.lora_{kind}.{name}.weight"
            for module in ("student", "fake_score")
            for kind in "AB"
        )


def test_fake_score_and_average_start_as_bit_equal_copies(build_roles, model, storage) -> None:
    roles = build_roles(model, storage, ALL, scramble=False)
    x, sigma, condition = inputs(model)
    found = {}
    for name in ALL:
        with torch.no_grad(), roles.use(name) as denoiser:
            found[name] = denoiser(x, sigma, condition).output
    for name in ("fake_score", "student_ema"):
        for own, first in zip(roles[name].tensors, roles["student"].tensors, strict=True):
            assert torch.equal(own, first)
        assert torch.equal(found[name], found["student"])
    # Before any update the student is the teacher.
    assert torch.equal(found["teacher_score"], found["student"])


def test_copies_do_not_share_memory(build_roles, model, storage) -> None:
    roles = build_roles(model, storage, ALL, scramble=False)
    memory = [p.data_ptr() for role in roles.values() for p in role.tensors]
    assert len(set(memory)) == len(memory)


def test_a_shared_base_is_in_memory_once(build_roles, model) -> None:
    roles = build_roles(model, "shared_base", ALL)
    (network,) = roles.storage.networks.values()
    base = sum(p.numel() for p in model.build_network().parameters())
    assert roles["teacher_score"].parameter_count == base
    assert sum(p.numel() for p in network.parameters()) == sum(
        role.parameter_count for role in roles.values()
    )
    assert len(roles.storage.networks) == 1


def test_independent_roles_have_a_network_each(build_roles, model) -> None:
    roles = build_roles(model, "independent", ALL)
    base = sum(p.numel() for p in model.build_network().parameters())
    assert {role.parameter_count for role in roles.values()} == {base}
    assert set(roles.storage.networks) == set(ALL)


def test_the_teacher_is_what_was_given(build_roles, model, storage) -> None:
    torch.manual_seed(0)
    teacher = model.build_network().double()
    x, sigma, condition = inputs(model)
    with torch.no_grad():
        expected = model.forward(teacher, x, sigma, condition)
    roles = build_roles(model, storage, teacher=teacher)
    with roles.use("teacher_score") as denoiser:
        assert torch.equal(denoiser(x, sigma, condition).output, expected)


@pytest.mark.parametrize("name", ALL)
def test_plain_network_is_the_role_without_our_code(build_roles, model, storage, name) -> None:
    roles = build_roles(model, storage, ALL, trained=("student", "fake_score", "student_ema"))
    x, sigma, condition = inputs(model)
    with torch.no_grad(), roles.use(name) as denoiser:
        expected = denoiser(x, sigma, condition).output
    plain = roles.storage.plain_network(name)
    with torch.no_grad():
        output = model.forward(plain, x, sigma, condition)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    fresh = model.build_network()
    assert list(plain.state_dict()) == list(fresh.state_dict())
    assert [type(m) for m in plain.modules()] == [type(m) for m in fresh.modules()]
    assert not hasattr(plain, "peft_config")
    # A copy: changing it leaves the role alone.
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
        with roles.use(name) as denoiser:
            assert torch.equal(denoiser(x, sigma, condition).output, expected)


@pytest.mark.parametrize(
    "targets", [("to_query",), ("to_q", "to_query"), ("o_q",), ("transformer_blocks",), ()]
)
def test_a_pattern_that_matches_nothing_is_refused_with_names_that_exist(
    dit_model, targets
) -> None:
    with pytest.raises(UserError) as error:
        build_shared_base(
            dit_model, dit_model.build_network(), ["student"], LoraSettings(targets=targets)
        )
    wrong = [t for t in targets if t != "to_q"]
    for pattern in wrong or ["the empty list"]:
        assert pattern in str(error.value)
    assert "lora.targets" in str(error.value)
    assert "attn1.to_q" in str(error.value)


def test_a_trained_role_that_owns_nothing_is_refused() -> None:
    model = ModuleModel(nn.Identity, (2,))
    networks = build_independent(model, nn.Identity(), ["student"])
    with pytest.raises(UserError, match=r"optimizers\.student.*nothing to train"):
        Roles(model, networks, ["student"], {"student": OptimizerSettings(lr=1e-3)})


def test_switching_touches_no_parameter(build_roles, dit_model) -> None:
    roles = build_roles(dit_model, "shared_base")
    before = {k: p.requires_grad for k, p in roles.storage.networks["base"].named_parameters()}
    for name in roles:
        with roles.use(name):
            network = roles.storage.networks["base"]
            assert {k: p.requires_grad for k, p in network.named_parameters()} == before
