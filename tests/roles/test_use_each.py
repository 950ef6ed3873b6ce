"""Several roles in force at once, each for its own part of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fewstep.errors import TrainingError, UserError
from fewstep.models.module import ModuleModel
from fewstep.parallel.compute import compute_in
from fewstep.roles.role import Roles

ROLES = ("student", "fake_score", "teacher_score", "student_ema")
TRAINED = ("student", "fake_score", "student_ema")
# The same role twice, apart and in a row, and the bare base in between.
PARTS = ("fake_score", "teacher_score", "student", "fake_score", "fake_score", "student_ema")


class Mixed(nn.Module):
    """A layer of every kind that can be adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.volume = nn.Conv3d(1, 2, 1)
        self.image = nn.Conv2d(2, 4, 3, padding=1)
        self.row = nn.Conv1d(4, 6, 3, padding=1, stride=2)
        self.tokens = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 16)

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor) -> Tensor:
        x = self.volume(x[:, None])[:, :, 0]
        x = self.row(self.image(x).flatten(2)).transpose(1, 2)
        x = torch.tanh(self.tokens(x) + self.embed(class_labels)[:, None] + sigma[:, None, None])
        return self.out(x.mean(1)).view(-1, 1, 4, 4)


MIXED = ModuleModel(Mixed, (1, 4, 4), classes=4)
MIXED_TARGETS = ("embed", "volume", "image", "row", "tokens", "out")


@pytest.fixture(params=["point", "dit", "mixed"])
def roles(request, build_roles, point_model, dit_model) -> Roles:
    model = {"point": point_model, "dit": dit_model, "mixed": MIXED}[request.param]
    targets = MIXED_TARGETS if request.param == "mixed" else None
    built = build_roles(model, "shared_base", ROLES, TRAINED, targets=targets)
    assert isinstance(built, Roles)
    return built


def inputs(roles: Roles, count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, *roles.model.sample_shape, generator=generator, dtype=torch.float64)
    sigma = torch.rand(count, generator=generator, dtype=torch.float64)
    return x, sigma, roles.model.example_condition(count)


@torch.no_grad()
def alone(roles: Roles, name: str, rows: slice, count: int) -> Tensor:
    x, sigma, condition = inputs(roles, count)
    with roles.use(name) as denoiser:
        part = {key: value[rows] for key, value in condition.items()}
        return denoiser(x[rows], sigma[rows], part).output


def hooks(roles: Roles) -> int:
    modules = list(roles.storage.networks["base"].modules())
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)


@pytest.mark.parametrize("samples", [1, 2])
def test_every_part_is_the_output_of_its_own_role(roles: Roles, samples: int) -> None:
    count = len(PARTS) * samples
    with roles.use_each(PARTS, samples) as denoiser:
        output = denoiser(*inputs(roles, count)).output
    assert not output.requires_grad
    outputs = []
    for index, name in enumerate(PARTS):
        rows = slice(index * samples, (index + 1) * samples)
        expected = alone(roles, name, rows, count)
        torch.testing.assert_close(output[rows], expected, rtol=1e-10, atol=1e-12)
        outputs.append(expected)
    for name in ("student", "teacher_score", "student_ema"):
        other = alone(roles, name, slice(0, samples), count)
        assert not torch.allclose(output[:samples], other, rtol=1e-3, atol=1e-3)


def test_every_part_is_its_own_roles_in_lower_precision_too(build_roles, dit_model) -> None:
    roles = build_roles(dit_model, "shared_base", dtype=torch.float32)
    compute_in(roles.storage.networks["base"], torch.bfloat16, "cpu")
    x, sigma, condition = inputs(roles, 4)
    with roles.use_each(["fake_score", "teacher_score"], 2) as denoiser:
        output = denoiser(x.float(), sigma.float(), condition).output
    for rows, name in ((slice(0, 2), "fake_score"), (slice(2, 4), "teacher_score")):
        with torch.no_grad(), roles.use(name) as one:
            part = {key: value[rows] for key, value in condition.items()}
            expected = one(x[rows].float(), sigma[rows].float(), part).output
        torch.testing.assert_close(output[rows], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("raises", [False, True])
def test_the_outer_role_is_restored_bit_for_bit(roles: Roles, raises: bool) -> None:
    given = inputs(roles, 4)
    with roles.use("student") as student:
        before = student(*given).output.detach()
        try:
            with roles.use_each(["fake_score", "teacher_score"], 2) as denoiser:
                assert hooks(roles) > 0
                denoiser(*given)
                if raises:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert raises
        assert torch.is_grad_enabled()
        assert torch.equal(student(*given).output, before)
        assert hooks(roles) == 0
    with pytest.raises(TrainingError, match="while no role was in use"):
        denoiser(*given)


def test_it_nests_with_itself_and_with_single_roles(roles: Roles) -> None:
    given = inputs(roles, 4)
    with torch.no_grad(), roles.use("student") as student:
        expected = student(*given).output
    with roles.use_each(["fake_score", "teacher_score"], 2) as outer:
        first = outer(*given).output
        with roles.use("student") as student:
            assert torch.equal(student(*given).output, expected)
            assert hooks(roles) == 0
        with roles.use_each(["teacher_score", "fake_score"], 2) as inner:
            swapped = inner(*given).output
            with pytest.raises(TrainingError, match="called as each of fake_score, teacher_score"):
                outer(*given)
        assert torch.equal(outer(*given).output, first)
    assert not torch.allclose(swapped, first, rtol=1e-3, atol=1e-3)
    assert hooks(roles) == 0


@pytest.mark.parametrize("within", ["student", "teacher_score"])
def test_calling_it_while_a_single_role_is_in_use_is_an_error(roles: Roles, within: str) -> None:
    given = inputs(roles, 4)
    with roles.use_each(["fake_score", "teacher_score"], 2) as denoiser, roles.use(within) as one:
        with pytest.raises(TrainingError, match=f"while {within} was in use"):
            denoiser(*given)
        one(*given)
    with (
        roles.use("student") as student,
        roles.use_each(["fake_score", "teacher_score"], 2),
        pytest.raises(TrainingError, match="'student' while each of fake_score"),
    ):
        student(*given)


def test_gradients_are_refused(roles: Roles) -> None:
    with (
        roles.use_each(["student", "fake_score"], 2) as denoiser,
        torch.enable_grad(),
        pytest.raises(TrainingError, match="with gradients enabled"),
    ):
        denoiser(*inputs(roles, 4))


def test_a_backward_pass_within_is_an_error(roles: Roles) -> None:
    given = inputs(roles, 4)
    with roles.use("student") as student:
        loss = student(*given).output.square().sum()
        with (
            roles.use_each(["fake_score", "teacher_score"], 2),
            pytest.raises(TrainingError, match="student was run while each of fake_score"),
        ):
            loss.backward()


@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_batch_of_another_size_is_refused(roles: Roles, count: int) -> None:
    with (
        pytest.raises(UserError, match=r"each of the 4 samples.*is given \["),
        roles.use_each(["fake_score", "teacher_score"], 2) as denoiser,
    ):
        denoiser(*inputs(roles, count))
    assert hooks(roles) == 0


class Positions(nn.Module):
    """Its first layer sees no samples but the places of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(2, 2)
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.out(x + self.place(torch.eye(2, dtype=x.dtype)).sum(0) + sigma[:, None])


def test_a_layer_that_sees_something_else_than_samples_is_refused_by_name(build_roles) -> None:
    model = ModuleModel(Positions, (2,))
    roles = build_roles(model, "shared_base", targets=("place", "out"))
    with (
        pytest.raises(UserError, match=r"'place' is given \[2, 2\]; .*'separate'"),
        roles.use_each(["fake_score", "teacher_score"], 2) as denoiser,
    ):
        denoiser(*inputs(roles, 4))
    roles = build_roles(model, "shared_base", targets=("out",))
    with roles.use_each(["fake_score", "teacher_score"], 2) as denoiser:
        denoiser(*inputs(roles, 4))


def test_networks_of_their_own_cannot_be_called_as_one(build_roles, point_model) -> None:
    roles = build_roles(point_model, "independent")
    given = inputs(roles, 2)
    together = roles.use_each(["fake_score", "teacher_score"], 1)
    with torch.no_grad(), roles.use("student") as student:
        with pytest.raises(ValueError, match="cannot share a network call"), together:
            pass
        student(*given)


@pytest.mark.parametrize("training", [False, True])
def test_the_network_runs_in_eval_mode_and_gets_its_mode_back(roles: Roles, training: bool) -> None:
    network = roles.storage.networks["base"].train(training)
    with roles.use_each(["fake_score", "teacher_score"], 2):
        assert not any(m.training for m in network.modules())
    assert network.training == training
