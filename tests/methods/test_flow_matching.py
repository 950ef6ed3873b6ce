from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.errors import UserError
from fewstep.methods.flow_matching import FlowMatching, FlowMatchingSettings, drop_labels
from fewstep.methods.options import SigmaSampling
from fewstep.roles.role import STUDENT, Roles

DRAW = Draw(3, 5, "student")
MakeRoles = Callable[..., Roles]


def method(**settings: object) -> FlowMatching:
    return FlowMatching(FlowMatchingSettings(**settings))  # type: ignore[arg-type]


def data(count: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)


def digits(roles: Roles, count: int = 8) -> Batch:
    return Batch(torch.arange(count), roles.model.example_condition(count), data(count, 1, 4, 4))


def loss_of(flow: FlowMatching, roles: Roles, batch: Batch, draw: Draw = DRAW) -> Tensor:
    return flow.phase_loss(STUDENT, roles, batch, draw, draw, {}).loss


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("storage", ["independent", "shared_base"])
def test_the_loss_is_the_formula(dit_roles: MakeRoles, storage: str, dropout: float) -> None:
    roles = dit_roles(storage)
    batch = digits(roles)
    assert batch.x0 is not None
    loss = loss_of(method(label_dropout=dropout), roles, batch)
    ids = batch.sample_ids
    eps = DRAW.normal("eps", ids, (1, 4, 4), torch.float64)
    sigma = DRAW.uniform("sigma", ids, torch.float64)
    dropped = DRAW.uniform("dropout", ids) < dropout
    labels = torch.where(dropped, 5, batch.condition["class_labels"])
    assert dropped.any() == (dropout > 0)
    s = sigma[:, None, None, None]
    x = (1 - s) * batch.x0 + s * eps
    network = roles.storage.plain_network(STUDENT)
    velocity = network(x, timestep=1000 * sigma, class_labels=labels).sample
    torch.testing.assert_close(loss, ((velocity - (eps - batch.x0)) ** 2).mean())


@pytest.mark.parametrize("path", ["rectified_flow", "variance_preserving", "edm"])
@pytest.mark.parametrize("kind", ["x0", "eps", "v", "velocity"])
@pytest.mark.parametrize("weighting", ["native", "x0"])
def test_other_paths_kinds_weightings_and_levels(
    mixture_roles: MakeRoles, path: str, kind: str, weighting: str
) -> None:
    roles = mixture_roles(path=path, prediction=kind)
    sigmas = SigmaSampling(kind="logit_normal", mean=0.2, std=0.7, shift=2.0)
    ids, x0 = torch.arange(8), data(8, 2)
    loss = loss_of(method(sigmas=sigmas, weighting=weighting), roles, Batch(ids, {}, x0))
    eps = DRAW.normal("eps", ids, (2,), torch.float64)
    sigma = torch.sigmoid(0.2 + 0.7 * DRAW.normal("sigma", ids, (), torch.float64))
    sigma = 2 * sigma / (1 + sigma)
    a, n = (f(sigma)[:, None] for f in (roles.model.path.alpha, roles.model.path.noise_scale))
    x = a * x0 + n * eps
    output = roles.storage.module(STUDENT)(x, sigma)
    if weighting == "native":
        target = {"x0": x0, "eps": eps, "v": a * eps - n * x0, "velocity": eps - x0}[kind]
        expected = ((output - target) ** 2).mean()
    else:
        estimate = {
            "x0": output,
            "eps": (x - n * output) / a,
            "v": (a * x - n * output) / (a**2 + n**2),
            "velocity": (x - n * output) / (a + n),
        }[kind]
        expected = ((estimate - x0) ** 2).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7])
def test_the_wanted_share_of_labels_is_dropped(
    dit_roles: MakeRoles, spy: Callable, share: float
) -> None:
    roles = dit_roles("independent")
    calls, batch, count = spy(roles), digits(roles, 4000), 4000
    with torch.no_grad():
        loss_of(method(label_dropout=share), roles, batch)
    seen = calls[0].condition["class_labels"]
    dropped = seen == 5
    assert abs(dropped.double().mean() - share) < 4 * (share * (1 - share) / count) ** 0.5 + 1e-9
    kept = batch.condition["class_labels"]
    assert torch.equal(seen[~dropped], kept[~dropped])
    assert batch.condition["class_labels"].max() == 4
    for label in range(5 if share else 0):
        of_label = dropped[kept == label].double().mean()
        assert abs(of_label - share) < 5 * (share * (1 - share) / 800) ** 0.5


def test_dropped_labels_are_keyed_by_sample_and_cycle(dit_roles: MakeRoles, spy: Callable) -> None:
    roles = dit_roles("independent")
    calls, flow, batch = spy(roles), method(label_dropout=0.5), digits(roles)

    def seen(part: Batch, draw: Draw, seed: int) -> list[int]:
        calls.clear()
        torch.manual_seed(seed)
        loss_of(flow, roles, part, draw)
        labels: list[int] = calls[0].condition["class_labels"].tolist()
        return labels

    whole = seen(batch, DRAW, 0)
    assert whole == seen(batch, DRAW, 1)
    assert whole == seen(batch.rows(0, 3), DRAW, 2) + seen(batch.rows(3, 8), DRAW, 3)
    assert whole != seen(batch, Draw(3, 6, "student"), 0)


def test_micro_batches_average_to_the_batch(dit_roles: MakeRoles) -> None:
    roles = dit_roles("independent")
    flow, batch = method(label_dropout=0.5), digits(roles)
    parts = torch.stack([loss_of(flow, roles, batch.rows(i, i + 2)) for i in (0, 2, 4, 6)])
    torch.testing.assert_close(parts.mean(), loss_of(flow, roles, batch))


def test_unconditional_networks_keep_their_empty_condition(mixture_roles: MakeRoles) -> None:
    model = mixture_roles().model
    condition: dict[str, Tensor] = {}
    assert drop_labels(model, condition, torch.ones(3, dtype=torch.bool)) is condition


def test_a_batch_without_data_is_refused(mixture_roles: MakeRoles) -> None:
    with pytest.raises(ValueError, match="trains on data"):
        loss_of(method(), mixture_roles(), Batch(torch.arange(3), {}))


def test_sampler_of_the_teacher() -> None:
    flow = method(sampling={"steps": 4, "shift": 3.0, "solver": "heun", "guidance": 2.0})
    spec = flow.sampler()
    assert spec.sigmas == pytest.approx([1, 0.9, 0.75, 0.5])
    assert (spec.solver, spec.guidance, spec.nfe) == ("heun", 2.0, 14)
    assert flow.sampler(2).sigmas == pytest.approx([1, 0.75])
    assert flow.fake_updates_per_student == 0


def test_guidance_of_an_unconditional_network_is_refused(mixture_roles: MakeRoles) -> None:
    flow = method(sampling={"guidance": 2.0})
    with pytest.raises(UserError, match=r"method\.sampling\.guidance is 2\.0"):
        flow.check(mixture_roles().model)
    method().check(mixture_roles().model)
