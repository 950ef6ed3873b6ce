import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.losses import dmd_direction, dmd_surrogate
from fewstep.diffusion.paths import EDM, Path, RectifiedFlow, VariancePreserving
from fewstep.diffusion.prediction import PredictionKind, convert
from fewstep.diffusion.samplers import sample_few_step
from fewstep.errors import UserError
from fewstep.methods.dmd2 import DMD2, sample_statistics
from fewstep.methods.dmd2_settings import DMD2Settings
from fewstep.methods.options import SigmaSampling
from fewstep.models.mixture import mixture_x0
from fewstep.models.module import ModuleModel
from fewstep.parallel.sharding import Replicated, spread
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.role import FAKE_SCORE, STUDENT, STUDENT_EMA, TEACHER_SCORE, Roles
from fewstep.roles.storage import Independent

DRAW, ROLLOUT = Draw(3, 5, "student"), Draw(3, 5, "student")
FAKE_DRAW = Draw(3, 5, "fake_score/1")
every_storage = pytest.mark.parametrize("storage", ["independent", "shared_base"])
MakeRoles = Callable[..., Roles]
MakeBatch = Callable[..., Batch]


def method(**settings: object) -> DMD2:
    return DMD2(DMD2Settings(**settings))  # type: ignore[arg-type]


def cycle_with_exit(steps: int, wanted: int, phase: str = "student") -> Draw:
    """The first draw whose exit step is the wanted one."""
    draws = (Draw(3, cycle, phase) for cycle in itertools.count(1))
    return next(d for d in draws if d.choice("exit", steps) == wanted)


# The gradient against that of the KL divergence, in closed form


class Gaussian(nn.Module):
    """The exact score of N(mean, std^2 I), as a network of some kind."""

    def __init__(self, mean: Tensor, std: Tensor, path: Path, kind: PredictionKind) -> None:
        super().__init__()
        self.mean = nn.Parameter(mean.clone(), requires_grad=False)
        self.std = nn.Parameter(std.clone(), requires_grad=False)
        self.path, self.kind = path, kind

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        x0 = mixture_x0(x, sigma, self.mean[None], self.std, self.path)
        return convert("x0", self.kind, x0, x, sigma, self.path)


class Affine(nn.Module):
    """A one-step generator x0 = mean + std * z, as a network that predicts velocity."""

    def __init__(self, mean: Tensor, std: Tensor, path: Path) -> None:
        super().__init__()
        self.mean, self.std, self.path = nn.Parameter(mean), nn.Parameter(std), path

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        x0 = self.mean + self.std * x / self.path.noise_scale(sigma)[:, None]
        return convert("x0", "velocity", x0, x, sigma, self.path)


@dataclass(frozen=True)
class Quadrature:
    """Gauss and Hermite's nodes in place of a draw: the batch is a grid over all noises."""

    nodes: Tensor
    sigma: float

    def normal(self, stream: str, ids: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        dimensions = shape[-1]
        part = self.nodes[:, :dimensions] if stream == "rollout" else self.nodes[:, dimensions:]
        return part.reshape(len(ids), *shape).to(dtype)

    def uniform(self, stream: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        assert stream == "sigma"
        return torch.full((len(ids),), self.sigma, dtype=dtype)

    def choice(self, stream: str, high: int) -> int:
        return 0


def quadrature(dimensions: int, order: int) -> tuple[Tensor, Tensor]:
    """Nodes [N, 2 * dimensions] and weights [N] of expectations over initial noise and eps."""
    points, weights = np.polynomial.hermite_e.hermegauss(order)
    weights = weights / weights.sum()
    nodes = torch.tensor(list(itertools.product(points, repeat=2 * dimensions)))
    products = [math.prod(w) for w in itertools.product(weights, repeat=2 * dimensions)]
    return nodes, torch.tensor(products, dtype=torch.float64)


def noised_kl(
    mean: Tensor, std: Tensor, teacher_mean: Tensor, teacher_std: float, a: float, n: float
) -> Tensor:
    """KL(N(a m, a^2 s^2 + n^2) || N(a mu, a^2 tau^2 + n^2)), isotropic."""
    p, q = a**2 * std**2 + n**2, torch.tensor(a**2 * teacher_std**2 + n**2, dtype=std.dtype)
    distance = a**2 * ((mean - teacher_mean) ** 2).sum()
    return 0.5 * (len(mean) * (p / q - 1 + torch.log(q / p)) + distance / q)


@pytest.mark.parametrize("path", [RectifiedFlow(), VariancePreserving(), EDM(2.0, 1.0)], ids=repr)
@pytest.mark.parametrize(("dimensions", "order"), [(1, 6), (2, 4)])
@pytest.mark.parametrize("sigma", [0.05, 0.4, 0.9])
def test_expected_direction_is_the_gradient_of_the_kl_divergence(
    path: Path, dimensions: int, order: int, sigma: float
) -> None:
    """DMD's theorem, through the method's own rollout and scores.

    Undone the normalisation, x0_fake - x0_real = (n^2 / alpha) (s_fake - s_real), and
    E[(s_fake - s_real) alpha dx0/dtheta] is the gradient of the divergence of the noised laws.
    """
    mean = torch.tensor([0.3, -0.8], dtype=torch.float64)[:dimensions]
    std = torch.tensor(0.7, dtype=torch.float64)
    teacher_mean = torch.tensor([-0.4, 0.5], dtype=torch.float64)[:dimensions]
    teacher_std = torch.tensor(0.35, dtype=torch.float64)
    student = Affine(mean.clone(), std.clone(), path)
    networks: dict[str, nn.Module] = {
        STUDENT: student,
        FAKE_SCORE: Gaussian(mean, std, path, "velocity"),
        TEACHER_SCORE: Gaussian(teacher_mean, teacher_std, path, "velocity"),
    }
    model = ModuleModel(nn.Identity, (dimensions,), path=path)
    model.forward = lambda network, x, sigma, condition: network(x, sigma)  # type: ignore[method-assign]
    trained = {STUDENT: OptimizerSettings(lr=1.0)}
    storage = Independent(networks)
    spread(storage, Replicated(), model.blocks, None, dtype=torch.float64)
    roles = Roles(model, storage, tuple(networks), trained, dtype=torch.float64)
    nodes, weights = quadrature(dimensions, order)
    draw, batch = Quadrature(nodes, sigma), Batch(torch.arange(len(nodes)), {})
    dmd2 = method(steps=1)

    x0 = dmd2.generate(roles, dmd2.simulate(roles, batch, draw))  # type: ignore[arg-type]
    torch.testing.assert_close(x0, mean + std * nodes[:, :dimensions])
    target = dmd2.score(roles, x0.detach(), batch, draw)  # type: ignore[arg-type]
    level = torch.tensor(sigma, dtype=torch.float64)
    x = path.add_noise(x0.detach(), nodes[:, dimensions:], level)
    real = mixture_x0(x, level, teacher_mean[None], teacher_std, path)
    normaliser = (x0.detach() - real).abs().mean(1, keepdim=True)
    assert normaliser.min() > 1e-6
    difference = target.direction * normaliser
    ours = torch.autograd.grad((x0 * difference).sum(1) @ weights, list(student.parameters()))

    free_mean, free_std = mean.clone().requires_grad_(), std.clone().requires_grad_()
    a, n = float(path.alpha(level)), float(path.noise_scale(level))
    divergence = noised_kl(free_mean, free_std, teacher_mean, float(teacher_std), a, n)
    exact = torch.autograd.grad(divergence, [free_mean, free_std])
    for gradient, expected in zip(ours, exact, strict=True):
        assert expected.abs().max() > 1e-5
        torch.testing.assert_close(gradient * a**2 / n**2, expected, rtol=1e-8, atol=1e-10)


def test_the_closed_form_divergence_is_right() -> None:
    mean, std = torch.tensor([0.3], dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    p = torch.distributions.Normal(0.6 * mean, torch.sqrt((0.6 * std) ** 2 + 0.4**2))
    q = torch.distributions.Normal(0.6 * -mean, math.sqrt((0.6 * 0.2) ** 2 + 0.4**2))
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(noised_kl(mean, std, -mean, 0.2, 0.6, 0.4), expected[0])


# The rollout


@pytest.mark.parametrize("transition", ["renoise", "euler"])
@pytest.mark.parametrize("exit_step", range(4))
def test_the_student_is_called_on_the_trained_grid(
    mixture_roles: MakeRoles, make_batch: MakeBatch, spy: Callable, transition: str, exit_step: int
) -> None:
    roles, dmd2 = mixture_roles(), method(steps=4, shift=3.0, transition=transition)
    calls = spy(roles)
    simulation = dmd2.simulate(roles, make_batch(roles.model), cycle_with_exit(4, exit_step))
    assert simulation.exit_step == exit_step
    assert not simulation.x.requires_grad
    dmd2.generate(roles, simulation)
    grid = dmd2.sampler().sigmas
    assert grid == pytest.approx([1, 0.9, 0.75, 0.5])
    assert [c.role for c in calls] == [STUDENT] * (exit_step + 1)
    assert [c.sigma.tolist() for c in calls] == [[sigma] * 6 for sigma in grid[: exit_step + 1]]


@pytest.mark.parametrize("transition", ["renoise", "euler"])
@pytest.mark.parametrize("path", ["rectified_flow", "variance_preserving", "edm"])
def test_the_rollout_is_the_sampler(
    mixture_roles: MakeRoles, make_batch: MakeBatch, transition: str, path: str
) -> None:
    """With the same noise, the last exit step gives the very samples of the few-step sampler."""
    roles, dmd2 = mixture_roles(path=path), method(steps=4, shift=2.0, transition=transition)
    batch, draw = make_batch(roles.model), cycle_with_exit(4, 3)
    with torch.no_grad():
        rolled = dmd2.generate(roles, dmd2.simulate(roles, batch, draw))
        noise = draw.normal("rollout", batch.sample_ids, (4, 2), torch.float64)
        with roles.use(STUDENT) as student:
            sampled = sample_few_step(
                lambda x, sigma: student(x, sigma, {}),
                roles.model.path.prior(noise[:, 0]),
                dmd2.sampler().sigmas,
                dmd2.settings.transition,
                lambda step: noise[:, step],
            )
    assert torch.equal(rolled, sampled)


def test_exit_zero_sees_the_initial_noise_itself(
    mixture_roles: MakeRoles, make_batch: MakeBatch
) -> None:
    roles, draw = mixture_roles(), cycle_with_exit(4, 0)
    batch = make_batch(roles.model)
    simulation = method(steps=4).simulate(roles, batch, draw)
    noise = draw.normal("rollout", batch.sample_ids, (1, 2), torch.float64)
    assert torch.equal(simulation.x, noise[:, 0])


def test_the_initial_noise_does_not_depend_on_the_exit_step(
    mixture_roles: MakeRoles, make_batch: MakeBatch, spy: Callable
) -> None:
    roles, batch = mixture_roles(), None
    calls = spy(roles)
    batch = make_batch(roles.model)
    draw = cycle_with_exit(4, 3)
    method(steps=4).simulate(roles, batch, draw)
    one_step = method(steps=1).simulate(roles, batch, draw)
    assert torch.equal(calls[0].x, one_step.x)


def test_the_exit_step_is_one_for_the_phase_and_blind_to_global_seeds(
    mixture_roles: MakeRoles, make_batch: MakeBatch, spy: Callable
) -> None:
    roles, dmd2 = mixture_roles(), method(steps=4)
    calls, whole = spy(roles), make_batch(roles.model)
    steps = []
    for cycle in range(1, 200):
        draw = Draw(0, cycle, "student")
        parts = [whole, whole.rows(0, 1), whole.rows(1, 6)]
        seen = []
        for rank, part in enumerate(parts):
            torch.manual_seed(1000 * cycle + rank)
            calls.clear()
            simulation = dmd2.simulate(roles, part, draw)
            seen.append((simulation.exit_step, len(calls)))
        assert len(set(seen)) == 1
        assert seen[0][0] == seen[0][1]
        steps.append(simulation.exit_step)
    assert scipy.stats.chisquare(np.bincount(steps, minlength=4)).pvalue > 1e-3


def test_a_rollout_in_parts_is_the_rollout(mixture_roles: MakeRoles, make_batch: MakeBatch) -> None:
    roles, dmd2, draw = mixture_roles(), method(steps=4), cycle_with_exit(4, 2)
    batch = make_batch(roles.model)
    whole = dmd2.simulate(roles, batch, draw).x
    parts = [dmd2.simulate(roles, batch.rows(i, j), draw).x for i, j in [(0, 1), (1, 4), (4, 6)]]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)


# A student phase


@every_storage
@pytest.mark.parametrize(("guidance", "teacher_calls"), [(1.0, 1), (3.0, 2)])
@pytest.mark.parametrize("exit_step", [0, 2])
def test_a_student_phase_makes_as_few_calls_as_it_can(
    dit_roles: MakeRoles,
    make_batch: MakeBatch,
    spy: Callable,
    storage: str,
    guidance: float,
    teacher_calls: int,
    exit_step: int,
) -> None:
    roles, dmd2 = dit_roles(storage), method(steps=4, guidance=guidance)
    calls, batch = spy(roles), make_batch(roles.model)
    draw = cycle_with_exit(4, exit_step)
    dmd2.phase_loss(STUDENT, roles, batch, draw, draw, {})
    by_role = [c.role for c in calls]
    expected = [STUDENT] * (exit_step + 1) + [FAKE_SCORE] + [TEACHER_SCORE] * teacher_calls
    assert by_role == expected
    labels = batch.condition["class_labels"].tolist()
    null = [5] * 6
    seen = [c.condition["class_labels"].tolist() for c in calls]
    assert seen == [labels] * (exit_step + 3) + [null] * (teacher_calls - 1)


@every_storage
def test_both_scores_see_the_same_input_at_the_same_level(
    dit_roles: MakeRoles, make_batch: MakeBatch, spy: Callable, storage: str
) -> None:
    roles, dmd2 = dit_roles(storage), method(steps=1, guidance=3.0)
    calls, batch = spy(roles), make_batch(roles.model)
    loss = dmd2.phase_loss(STUDENT, roles, batch, DRAW, ROLLOUT, {})
    _, fake, *teacher = calls
    for call in teacher:
        assert torch.equal(call.x, fake.x)
        assert torch.equal(call.sigma, fake.sigma)
    ids, x0 = batch.sample_ids, loss.outputs["x0"]
    eps = DRAW.normal("eps", ids, (1, 4, 4), torch.float64)
    sigma = DRAW.uniform("sigma", ids, torch.float64).clamp(0.02, 0.98)
    assert torch.equal(fake.sigma, sigma)
    s = sigma[:, None, None, None]
    torch.testing.assert_close(fake.x, (1 - s) * x0 + s * eps)


@every_storage
def test_the_direction_is_the_formula(
    dit_roles: MakeRoles, make_batch: MakeBatch, storage: str
) -> None:
    roles, dmd2 = dit_roles(storage), method(guidance=3.0)
    batch = make_batch(roles.model)
    x0 = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = dmd2.score(roles, x0, batch, DRAW)
    labels = batch.condition["class_labels"]
    eps = DRAW.normal("eps", batch.sample_ids, (1, 4, 4), torch.float64)
    sigma = DRAW.uniform("sigma", batch.sample_ids, torch.float64).clamp(0.02, 0.98)
    s = sigma[:, None, None, None]
    x = (1 - s) * x0 + s * eps

    def velocity(role: str, chosen: Tensor) -> Tensor:
        network = roles.storage.plain_network(role)
        with torch.no_grad():
            return network(x, timestep=1000 * sigma, class_labels=chosen).sample

    conditional, null = velocity(TEACHER_SCORE, labels), torch.full_like(labels, 5)
    unconditional = velocity(TEACHER_SCORE, null)
    real = x - s * (unconditional + 3 * (conditional - unconditional))
    fake = x - s * velocity(FAKE_SCORE, labels)
    scale = (x0 - real).abs().mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(target.direction, (fake - real) / scale, rtol=1e-9, atol=1e-11)
    assert not target.nonfinite_entries.any()
    assert not target.direction.requires_grad


@every_storage
@pytest.mark.parametrize("exit_step", [0, 3])
def test_the_students_graph_survives_the_scores(
    dit_roles: MakeRoles, make_batch: MakeBatch, storage: str, exit_step: int
) -> None:
    """The gradient is that of a copy of the student, given a direction that was made before."""
    roles, dmd2 = dit_roles(storage), method(steps=4)
    batch, draw = make_batch(roles.model), cycle_with_exit(4, exit_step)
    simulation = dmd2.simulate(roles, batch, draw)
    with torch.no_grad():
        samples = dmd2.generate(roles, simulation)
    direction = dmd2.score(roles, samples, batch, draw).direction
    copied = copy.deepcopy(roles.storage.module(STUDENT))
    own = {id(p): k for k, p in roles.storage.module(STUDENT).named_parameters()}
    names = [own[id(p)] for p in roles[STUDENT].tensors]
    if storage == "shared_base":
        roles.storage.activate(STUDENT)
        copied = copy.deepcopy(roles.storage.module(STUDENT))
        roles.storage.activate(None)
    sigma = simulation.sigma.expand(6)
    output = roles.model.forward(copied, simulation.x, sigma, batch.condition)
    surrogate = dmd_surrogate(simulation.x - simulation.sigma * output, direction).mean()
    expected = torch.autograd.grad(surrogate, [copied.get_parameter(n) for n in names])

    with roles.use(STUDENT):
        loss = dmd2.phase_loss(STUDENT, roles, batch, draw, draw, {})
        loss.loss.backward()
    roles.check_gradients(STUDENT)
    assert max(float(g.abs().max()) for g in expected) > 1e-6
    for parameter, gradient in zip(roles[STUDENT].tensors, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss.loss, surrogate)


def test_the_loss_is_the_mean_over_samples_of_half_the_squared_direction(
    mixture_roles: MakeRoles, make_batch: MakeBatch
) -> None:
    roles, dmd2 = mixture_roles(), method(steps=2)
    batch = make_batch(roles.model)
    loss = dmd2.phase_loss(STUDENT, roles, batch, DRAW, ROLLOUT, {})
    x0 = loss.outputs["x0"]
    direction = dmd2.score(roles, x0, batch, DRAW).direction
    torch.testing.assert_close(loss.loss, 0.5 * (direction**2).mean())
    parts = [
        dmd2.phase_loss(STUDENT, roles, batch.rows(i, i + 2), DRAW, ROLLOUT, {}).loss
        for i in (0, 2, 4)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), loss.loss)
    assert not x0.requires_grad
    assert loss.entries == 12
    assert loss.normalizer is None


def test_a_target_from_elsewhere_takes_the_place_of_the_scores(
    mixture_roles: MakeRoles, make_batch: MakeBatch, spy: Callable
) -> None:
    roles, dmd2 = mixture_roles(), method(steps=2)
    batch = make_batch(roles.model)
    here = dmd2.phase_loss(STUDENT, roles, batch, DRAW, ROLLOUT, {})
    target = dmd2.score(roles, here.outputs["x0"], batch, DRAW)
    calls = spy(roles)
    simulation = dmd2.simulate(roles, batch, ROLLOUT)
    there = dmd2.student_loss(roles, simulation, DRAW, target)
    assert {c.role for c in calls} == {STUDENT}
    assert torch.equal(there.loss, here.loss)


def test_directions_that_are_not_finite_are_counted_and_zeroed(
    mixture_roles: MakeRoles, make_batch: MakeBatch
) -> None:
    roles, dmd2 = mixture_roles(), method(steps=1)
    batch = make_batch(roles.model)
    x0 = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clean = dmd2.score(roles, x0, batch, DRAW)
    x0[2, 1] = math.nan
    target = dmd2.score(roles, x0, batch, DRAW)
    assert target.nonfinite_entries.tolist() == [0, 0, 2, 0, 0, 0]
    assert target.direction[2].tolist() == [0.0, 0.0]
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(target.direction[rest], clean.direction[rest])


def test_statistics_are_those_of_the_samples(
    mixture_roles: MakeRoles, make_batch: MakeBatch
) -> None:
    loss = method(steps=1).phase_loss(
        STUDENT, roles := mixture_roles(), make_batch(roles.model), DRAW, ROLLOUT, {}
    )
    x0 = loss.outputs["x0"]
    assert loss.metrics["sample_mean"].item() == pytest.approx(x0.mean().item())
    assert loss.metrics["sample_mean_square"].item() == pytest.approx((x0**2).mean().item())
    each = ((x0 - x0.mean(1, keepdim=True)) ** 2).mean(1)
    assert loss.metrics["sample_variance"].item() == pytest.approx(each.mean().item())


def test_flat_samples_have_no_variance_though_they_differ() -> None:
    flat = torch.arange(4.0)[:, None, None, None].expand(4, 3, 2, 2)
    statistics = sample_statistics(flat)
    assert statistics["sample_variance"].item() == 0
    assert statistics["sample_mean_square"].item() == pytest.approx(3.5)


# A fake_score phase


@pytest.mark.parametrize("path", ["rectified_flow", "variance_preserving", "edm"])
@pytest.mark.parametrize("kind", ["velocity", "eps"])
def test_fake_score_loss_is_the_formula(
    mixture_roles: MakeRoles, make_batch: MakeBatch, spy: Callable, path: str, kind: str
) -> None:
    roles = mixture_roles(path=path, prediction=kind)
    calls, batch = spy(roles), make_batch(roles.model)
    x0 = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = method().phase_loss(FAKE_SCORE, roles, batch, FAKE_DRAW, FAKE_DRAW, {"x0": x0})
    eps = FAKE_DRAW.normal("eps", batch.sample_ids, (2,), torch.float64)
    sigma = FAKE_DRAW.uniform("sigma", batch.sample_ids, torch.float64)
    p = roles.model.path
    x = p.alpha(sigma)[:, None] * x0 + p.noise_scale(sigma)[:, None] * eps
    output = roles.storage.module(FAKE_SCORE)(x, sigma)
    target = eps - x0 if kind == "velocity" else eps
    torch.testing.assert_close(loss.loss, ((output - target) ** 2).mean())
    assert [c.role for c in calls] == [FAKE_SCORE]
    assert torch.equal(loss.outputs["x0"], x0)


def test_fake_sigmas_are_not_the_scoring_range(
    mixture_roles: MakeRoles, make_batch: MakeBatch, spy: Callable
) -> None:
    roles = mixture_roles()
    calls, batch = spy(roles), make_batch(roles.model, 2000)
    narrow = SigmaSampling(minimum=0.4, maximum=0.6)
    dmd2 = method(steps=1, score_sigmas=narrow)
    x0 = torch.zeros(2000, 2, dtype=torch.float64)
    dmd2.score(roles, x0, batch, DRAW)
    dmd2.fake_score_loss(roles, x0, batch, FAKE_DRAW)
    scored, _, fake = calls
    assert scored.sigma.min() == 0.4
    assert scored.sigma.max() == 0.6
    assert fake.sigma.min() < 0.01
    assert fake.sigma.max() > 0.99


@every_storage
def test_a_fake_phase_makes_its_own_samples_and_no_gradient_reaches_the_student(
    dit_roles: MakeRoles, make_batch: MakeBatch, spy: Callable, storage: str
) -> None:
    roles, dmd2 = dit_roles(storage), method(steps=4)
    calls, batch = spy(roles), make_batch(roles.model)
    draw = cycle_with_exit(4, 2, "fake_score/1")
    with roles.use(FAKE_SCORE):
        loss = dmd2.phase_loss(FAKE_SCORE, roles, batch, draw, draw, {})
        loss.loss.backward()
    assert [c.role for c in calls] == [STUDENT] * 3 + [FAKE_SCORE]
    roles.check_gradients(FAKE_SCORE)
    assert all(p.grad is None for p in roles[STUDENT].tensors)
    with torch.no_grad():
        expected = dmd2.generate(roles, dmd2.simulate(roles, batch, draw))
    assert torch.equal(loss.outputs["x0"], expected)


def test_samples_handed_over_are_used_as_they_are(
    mixture_roles: MakeRoles, make_batch: MakeBatch, spy: Callable
) -> None:
    roles, dmd2 = mixture_roles(), method(steps=4)
    batch = make_batch(roles.model)
    student = dmd2.phase_loss(STUDENT, roles, batch, DRAW, ROLLOUT, {})
    calls = spy(roles)
    handed = dmd2.phase_loss(FAKE_SCORE, roles, batch, FAKE_DRAW, ROLLOUT, student.outputs)
    assert [c.role for c in calls] == [FAKE_SCORE]
    made = dmd2.phase_loss(FAKE_SCORE, roles, batch, FAKE_DRAW, ROLLOUT, {})
    assert torch.equal(made.loss, handed.loss)


# Settings


def test_the_grid_is_one_for_training_and_sampling() -> None:
    dmd2 = method(steps=4, shift=5.0)
    assert [1000 * s for s in dmd2.sampler().sigmas] == pytest.approx([1000, 937.5, 2500 / 3, 625])
    assert dmd2.sampler(4) == dmd2.sampler()
    assert dmd2.sampler().guidance == 1
    assert dmd2.sampler().nfe == 4
    assert method(steps=2, sigmas=(0.9, 0.4)).sampler().sigmas == (0.9, 0.4)
    other = method(steps=2, sigmas=(0.9, 0.4), transition="euler").sampler(3)
    assert (other.steps, other.solver) == (3, "euler")


def test_the_scores_are_sampled_in_many_steps_and_the_teacher_as_it_teaches() -> None:
    dmd2 = method(steps=2, shift=5.0, guidance=4.0, sigmas=(0.9, 0.4))
    for role, guidance in ((TEACHER_SCORE, 4.0), (FAKE_SCORE, 1.0)):
        spec = dmd2.sampler(4, role)
        assert (spec.solver, spec.guidance) == ("euler", guidance)
        assert spec.sigmas == pytest.approx([0.9, 0.9 * 0.9375, 0.9 * 2.5 / 3, 0.9 * 0.625])
        assert dmd2.sampler(role=role).steps == 50
    assert dmd2.sampler(role=STUDENT_EMA) == dmd2.sampler()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 3, "sigmas": (1.0, 0.5)}, "steps is 3, but sigmas has 2 entries"),
        ({"steps": 2, "sigmas": (0.5, 1.0)}, "must fall from noise to data"),
        ({"steps": 2, "sigmas": (0.5, 0.5)}, "must fall from noise to data"),
        ({"steps": 2, "sigmas": (0.5, 0.0)}, "greater than 0"),
        ({"steps": 9}, "less than or equal to 8"),
        ({"steps": True}, "valid integer"),
        ({"fake_updates_per_student": 0}, "greater than or equal to 1"),
        ({"transition": "heun"}, "renoise"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DMD2Settings(**wrong)


def test_guidance_is_refused_where_it_makes_no_sense(
    mixture_roles: MakeRoles, dit_roles: MakeRoles
) -> None:
    guided = method(guidance=3.0)
    with pytest.raises(UserError, match=r"method\.guidance is 3\.0, but the teacher is uncond"):
        guided.check(mixture_roles().model)
    model = dit_roles("independent").model
    guided.check(model)
    model.guidance_distilled = True
    with pytest.raises(UserError, match=r"guidance_distilled is true.*use 1"):
        guided.check(model)
    method(guidance=1.0).check(model)


def test_noise_networks_cannot_start_from_noise_alone(mixture_roles: MakeRoles) -> None:
    flow = mixture_roles(prediction="eps").model
    with pytest.raises(UserError, match=r"'eps'.*method\.sigmas\[0\] = 1\.0"):
        method(steps=4).check(flow)
    method(steps=1, sigmas=(0.99,)).check(flow)
    method(steps=4).check(mixture_roles(prediction="eps", path="variance_preserving").model)


def test_the_direction_of_the_paper_is_the_one_in_use() -> None:
    x0, fake, real = (torch.full((1, 2), v) for v in (0.0, 1.0, -2.0))
    assert dmd_direction(x0, fake, real).tolist() == [[1.5, 1.5]]
