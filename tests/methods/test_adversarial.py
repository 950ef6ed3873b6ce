"""DMD2's adversarial head: whose gradients go where, and that they are the right ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import ON, OPTIMIZER, MakeWorker, gradients, phase_loss, run_in_two_parts, spying
from torch import Tensor, nn

import fewstep
from fewstep.build import build_worker
from fewstep.data.dataset import Dataset
from fewstep.diffusion.draw import Draw
from fewstep.errors import UserError
from fewstep.methods.adversarial import Adversary
from fewstep.methods.dmd2 import DMD2
from fewstep.pretrained import load_weights
from fewstep.training.cycle import plan_cycle
from fewstep.training.loop import run_cycle

R1 = {"method.adversarial.r1": {"weight": 2.0, "std": 0.1}}
EXACT = {"method.adversarial.r1": {"weight": 2.0, "kind": "exact"}}
TEACHER = {"method.adversarial.features_from": "teacher_score"}


# Ownership


@pytest.mark.parametrize("change", [{}, R1, EXACT, TEACHER, {**TEACHER, **EXACT}])
@pytest.mark.parametrize("role", ["student", "fake_score", "discriminator"])
def test_gradients_reach_the_role_that_is_trained_and_nothing_else(
    make_worker: MakeWorker, storage: str, role: str, change: dict[str, Any]
) -> None:
    worker = make_worker(storage, change)
    phase_loss(worker, role)
    worker.roles.check_gradients(role)
    assert any(float(g.abs().max()) > 0 for g in gradients(worker, role).values())
    for network in worker.roles.storage.networks.values():
        own = {id(p) for p in worker.roles[role].tensors}
        assert all(p.grad is None for p in network.parameters() if id(p) not in own)


def test_recomputed_blocks_give_the_same_gradients(make_worker: MakeWorker, storage: str) -> None:
    found = []
    for recompute in (False, True):
        worker = make_worker(storage, EXACT, {"runtime.activation_checkpointing": recompute})
        for role in ("student", "discriminator"):
            phase_loss(worker, role)
        found.append([gradients(worker, role) for role in ("student", "discriminator")])
    for plain, recomputed in zip(*found, strict=True):
        for key, gradient in plain.items():
            torch.testing.assert_close(recomputed[key], gradient)


# The generator's term


@pytest.mark.parametrize("features_from", ["fake_score", "teacher_score"])
def test_the_pull_is_that_of_autograd_through_everything(
    make_worker: MakeWorker, storage: str, features_from: str
) -> None:
    """The whole loss, written out, with the graph from the logit to the student's weights."""
    worker = make_worker(storage, {"method.adversarial.features_from": features_from})
    roles, method = worker.roles, worker.method
    assert isinstance(method, DMD2)
    loss = phase_loss(worker, "student")
    ours = gradients(worker, "student")
    worker._clear_gradients(roles["student"])

    draw = Draw(3, 1, "student")
    batch = worker.batches.batch(draw, 4)
    with roles.use("student"):
        x0 = method.generate(roles, method.simulate(roles, batch, draw))
        target = method.score(roles, x0.detach(), batch, draw)
        eps = draw.normal("adversarial_eps", batch.sample_ids, x0.shape[1:], x0.dtype)
        sigma = draw.uniform("adversarial_sigma", batch.sample_ids, x0.dtype)
        x = roles.model.path.add_noise(x0, eps, sigma)
        with roles.use_features(features_from, None) as features:
            tokens = features(x, sigma, batch.condition)
        logits = roles.storage.networks["discriminator"](*tokens)[:, 0]
        dmd = 0.5 * ((x0 - (x0 - target.direction).detach()) ** 2).mean()
        deceive = nn.functional.softplus(-logits)
        whole = dmd + 0.5 * deceive.mean()
    tensors = roles["student"].parameters
    # With no role in use: this graph goes through two of them.
    exact = torch.autograd.grad(whole, list(tensors.values()))
    torch.testing.assert_close(loss.loss, whole)
    torch.testing.assert_close(loss.metrics["generator_loss"], deceive.mean())
    assert ours.keys() == tensors.keys()
    for key, expected in zip(tensors, exact, strict=True):
        torch.testing.assert_close(ours[key], expected)
    # And it is no small part.
    worker.method.adversary = Adversary(  # type: ignore[attr-defined]
        method.settings.adversarial.model_copy(update={"generator_weight": 1e-12})  # type: ignore
    )
    phase_loss(worker, "student")
    without = gradients(worker, "student")
    assert max(float((ours[k] - without[k]).norm() / ours[k].norm()) for k in ours) > 0.05


def test_what_another_group_says_is_what_one_would_say_itself(
    make_worker: MakeWorker, storage: str
) -> None:
    worker = make_worker(storage)
    draw = Draw(3, 1, "student")
    batch = worker.batches.batch(draw, 4)
    method = worker.method
    assert isinstance(method, DMD2)
    with torch.no_grad():
        x0 = method.generate(worker.roles, method.simulate(worker.roles, batch, draw))
    external = method.score_for("student", worker.roles, x0, batch, draw)
    specs = method.external_tensors("student", worker.roles.model, torch.float64)
    assert external.keys() == specs.keys()
    for key, value in external.items():
        assert tuple(value.shape[1:]) == tuple(specs[key].shape)
        assert value.dtype == specs[key].dtype
        assert not value.requires_grad
    alone = phase_loss(worker, "student")
    expected = gradients(worker, "student")
    worker._clear_gradients(worker.roles["student"])
    given = phase_loss(worker, "student", external)
    assert torch.equal(alone.loss, given.loss)
    for key, gradient in gradients(worker, "student").items():
        assert torch.equal(gradient, expected[key]), key


def test_a_pull_that_is_not_finite_is_zeroed_and_counted_with_its_direction(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker()
    term = Adversary.generator_term

    def spoiled(self: Adversary, *args: Any) -> tuple[Tensor, Tensor]:
        gradient, losses = term(self, *args)
        gradient[1, 0, 0, 0], losses[1] = float("nan"), float("inf")
        return gradient, losses

    monkeypatch.setattr(Adversary, "generator_term", spoiled)
    loss = phase_loss(worker, "student")
    assert int(loss.nonfinite_entries) == 1
    assert torch.isfinite(loss.loss)
    assert all(bool(torch.isfinite(g).all()) for g in gradients(worker, "student").values())


def test_a_classifier_that_is_broken_skips_the_student(make_worker: MakeWorker) -> None:
    worker = make_worker("independent", {"method.fake_updates_per_student": 1})
    with torch.no_grad():
        worker.roles.storage.networks["discriminator"].leave.bias.fill_(float("nan"))
    student, *_ = plan_cycle(1, 1, fewstep.config.CycleSettings(), worker.method.followers)
    result = worker.run_phase(student)
    assert not result.updated
    assert result.metrics["finite_share"] == 0


# The classifier


def test_the_approximate_penalty_moves_the_very_input_that_is_classified(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker("independent", R1)
    with spying(worker.roles.model) as calls:
        loss = phase_loss(worker, "discriminator")
    x, sigma = calls[-1]
    real, fake, moved = x.chunk(3)
    assert sigma.chunk(3)[0].equal(sigma.chunk(3)[2])
    draw = Draw(3, 1, "discriminator")
    ids = torch.arange(4)
    delta = draw.normal("r1_delta", ids, real.shape[1:], real.dtype)
    torch.testing.assert_close(moved - real, 0.1 * delta)
    batch = worker.batches.batch(draw, 4)
    eps = draw.normal("eps_real", ids, real.shape[1:], real.dtype)
    path = worker.roles.model.path
    torch.testing.assert_close(real, path.add_noise(batch.x0, eps, sigma[:4]))
    assert not torch.allclose(fake, real)
    # Where it is moved less, what it sees differs less: with the square of the distance.
    nearer = make_worker("independent", {"method.adversarial.r1": {"weight": 2.0, "std": 1e-4}})
    small = phase_loss(nearer, "discriminator").metrics["r1"]
    assert float(small / loss.metrics["r1"]) == pytest.approx(1e-6, rel=0.5)


def test_the_exact_penalty_is_the_limit_of_the_approximate_one(make_worker: MakeWorker) -> None:
    """In the mean over delta; here along enough of them for ten per cent."""
    exact = float(phase_loss(make_worker("independent", EXACT), "discriminator").metrics["r1"])
    tiny = {"method.adversarial.r1": {"weight": 1.0, "std": 1e-5}}
    worker, found = make_worker("independent", tiny), []
    batch = worker.batches.batch(Draw(3, 1, "discriminator"), 4)
    real, normal = batch.x0, Draw.normal
    assert real is not None
    cycles = iter(range(400))

    def others(self: Draw, stream: str, *rest: Any) -> Tensor:
        draw = replace(self, cycle=next(cycles)) if stream == "r1_delta" else self
        return normal(draw, stream, *rest)

    for _ in range(400):
        Draw.normal = others  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                loss = worker.method.adversary.classifier_loss(  # type: ignore[attr-defined]
                    worker.roles, real, batch, Draw(3, 1, "discriminator")
                )
        finally:
            Draw.normal = normal  # type: ignore[method-assign]
        found.append(float(loss.metrics["r1"]) / 1e-10)
    assert sum(found) / len(found) == pytest.approx(exact, rel=0.1)


def test_the_classifier_learns_to_tell_them_apart(make_worker: MakeWorker) -> None:
    worker = make_worker("independent", {"train.batch_size": 10})
    metrics: list[Mapping[str, float]] = []
    for cycle in range(1, 60):
        fake, judged = plan_cycle(
            cycle, 1, fewstep.config.CycleSettings(), worker.method.followers
        )[1:]
        worker.batches.batch(Draw(3, cycle, fake.rollout), 10)
        metrics.append(worker.run_phase(judged).metrics)
    late = metrics[-10:]
    assert sum(m["accuracy"] for m in late) / 10 > 0.65
    assert sum(m["logit_real"] - m["logit_fake"] for m in late) > 0
    assert {"classifier_loss", "logit_real", "logit_fake", "accuracy"} <= late[0].keys()


def test_a_round_shares_its_samples(make_worker: MakeWorker) -> None:
    worker = make_worker("independent")
    student_calls: list[str] = []
    generate = worker.method.generate  # type: ignore[attr-defined]
    worker.method.generate = lambda *args: (student_calls.append("x0"), generate(*args))[1]  # type: ignore
    for batches, expected in (("fresh", 3), ("reuse_student", 1)):
        student_calls.clear()
        settings = fewstep.config.CycleSettings(fake_batches=batches)
        results = run_cycle(worker, 1, 2, settings, worker.method.followers)
        assert [r.request.name for r in results] == [
            "student",
            "fake_score/0",
            "discriminator/0",
            "fake_score/1",
            "discriminator/1",
        ]
        assert len(student_calls) == expected


def test_its_first_weights_are_the_seeds_whoever_lives_beside_it(
    make_recipe: Callable[..., Any],
) -> None:
    def head(seed: int, roles: tuple[str, ...] | None, **changes: Any) -> Tensor:
        recipe = make_recipe("dmd2", {**ON, "seed": seed, **changes})
        model = recipe.model.build()
        worker = build_worker(recipe, model, None, load_weights(recipe, model), roles=roles)
        weight: Tensor = worker.roles.storage.networks["discriminator"].join.weight
        return weight

    first, critic = head(3, None), ("fake_score", "teacher_score", "discriminator")
    assert torch.equal(first, head(3, critic))
    assert torch.equal(first, head(3, critic, storage="shared_base"))
    assert not torch.equal(first, head(4, None))


def test_it_cannot_be_sampled(make_worker: MakeWorker) -> None:
    worker = make_worker()
    x = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    with (
        worker.roles.use("discriminator") as denoiser,
        pytest.raises(UserError, match="'discriminator' makes no samples"),
    ):
        denoiser(x, torch.tensor(0.5), {"class_labels": torch.zeros(1, dtype=torch.int64)})


# Runs


def test_weight_zero_is_off_bit_for_bit(
    make_recipe: Callable[..., Any],
    tmp_path: Path,
    flat_state: Callable[..., Any],
    assert_equal_states: Callable[..., None],
    no_sync: None,
) -> None:
    off = {"method.adversarial": {"generator_weight": 0.0}, "optimizers.discriminator": OPTIMIZER}
    found = []
    for name, changes in (("plain", {}), ("off", off)):
        recipe = make_recipe("dmd2", {"run_dir": str(tmp_path / name), **changes})
        assert recipe.roles == ("student", "fake_score", "teacher_score", "student_ema")
        with spying(recipe.model.build()) as calls:
            run = fewstep.train(recipe)
        found.append((flat_state(run), len(calls)))
    assert_equal_states(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] > 0


def test_two_and_two_cycles_are_four_bit_for_bit(
    make_recipe: Callable[..., Any],
    tmp_path: Path,
    ten_images: Dataset,
    storage: str,
    flat_state: Callable[..., Any],
    assert_equal_states: Callable[..., None],
    no_sync: None,
) -> None:
    changes = {**ON, **R1, "storage": storage}

    def train(name: str, **arguments: Any) -> Any:
        recipe = make_recipe("dmd2", {**changes, "run_dir": str(tmp_path / name)})
        return fewstep.train(recipe, data=ten_images, **arguments)

    whole, parts = map(flat_state, run_in_two_parts(train))
    assert_equal_states(whole, parts)
    assert any(key.startswith("/networks/discriminator/") for key in whole)
    assert any(key.startswith("/optimizers/discriminator/") for key in whole)
    opened = fewstep.open_run(tmp_path / "whole")
    assert opened.roles["discriminator"].successful == 8
    assert opened.sample(2).images.shape == (2, 1, 4, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"optimizers.discriminator": None},
            "optimizers: method 'dmd2' trains student, fake_score,",
        ),
        ({"data.name": "none"}, "data.name: the classifier, method.adversarial, trains on data"),
        (
            {**EXACT, "parallel.kind": "fsdp2"},
            "method.adversarial.r1.kind: 'exact' differentiates twice",
        ),
        (
            {"parallel.kind": "fsdp1", "storage": "shared_base"},
            "method.adversarial: parallel.kind 'fsdp1' cannot run a backward pass",
        ),
        ({"method.adversarial": {"blocks": []}}, "method.adversarial.blocks: "),
        ({"method.adversarial": {"r1": {}}}, "method.adversarial.r1.weight: is missing"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    make_recipe: Callable[..., Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_recipe("dmd2", {**ON, **changes})
    assert said in str(caught.value)


def test_an_unknown_block_is_refused_with_those_that_exist(
    make_recipe: Callable[..., Any], ten_images: Dataset
) -> None:
    recipe = make_recipe("dmd2", {**ON, "method.adversarial": {"blocks": ["transformer_blocks.7"]}})
    with pytest.raises(UserError, match=r"'transformer_blocks\.7' is not there; there are: transf"):
        fewstep.train(recipe, data=ten_images)
