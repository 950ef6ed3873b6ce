"""The adversarial head as a part of the fake score: both learn from the classifier's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import ON, MakeWorker, gradients, phase_loss, run_in_two_parts, spying
from torch import Tensor, nn
from torch.nn.functional import softplus

import fewstep
from fewstep.data.dataset import Dataset
from fewstep.diffusion.draw import Draw
from fewstep.errors import TrainingError, UserError
from fewstep.methods.adversarial import Adversary
from fewstep.training.phase import PhaseRequest
from fewstep.training.worker import Worker

WEIGHT, R1_WEIGHT, STD = 0.7, 2.0, 0.1
JOINT: dict[str, Any] = {
    "method.adversarial": {
        "generator_weight": 0.5,
        "classifier_weight": WEIGHT,
        "trained_with": "fake_score",
    },
    "optimizers.discriminator": None,
}
R1 = {"method.adversarial.r1": {"weight": R1_WEIGHT, "std": STD}}
FAKE = PhaseRequest(1, "fake_score/0", "fake_score", "fake_score/0")


def of_head(role: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a role's tensors that are the classifier's."""
    return {key: value for key, value in role.items() if key.startswith("discriminator..")}


def written_out(worker: Worker, with_r1: bool) -> tuple[Tensor, Tensor]:
    """The denoising loss and the classifier's, by a network call for each of their inputs."""
    roles, draw = worker.roles, Draw(3, 1, "fake_score")
    batch, path = worker.batches.batch(draw, 4), worker.roles.model.path
    ids, real = batch.sample_ids, batch.x0
    assert real is not None
    with torch.no_grad():
        method: Any = worker.method
        made = method.generate(roles, method.simulate(roles, batch, draw))
    shape = made.shape[1:]

    def noise(stream: str) -> Tensor:
        return draw.normal(stream, ids, shape, made.dtype)

    network = roles.storage.networks[roles.storage.network_of("fake_score")]
    blocks = list(network.transformer_blocks)  # type: ignore[arg-type]
    block: nn.Module = blocks[len(blocks) // 2]
    head = roles.storage.networks["discriminator"]
    seen: list[Tensor] = []
    handle = block.register_forward_hook(lambda module, args, output: seen.append(output))
    level = draw.uniform("sigma", ids, made.dtype)
    judged = draw.uniform("adversarial_sigma", ids, made.dtype)
    shown = {
        "real": path.add_noise(real, noise("eps_real"), judged),
        "made": path.add_noise(made, noise("eps_fake"), judged),
    }
    shown["moved"] = shown["real"] + STD * noise("r1_delta")
    logits = {}
    with roles.use("fake_score") as fake_score:
        eps = noise("eps")
        prediction = fake_score(path.add_noise(made, eps, level), level, batch.condition)
        for name, x in shown.items():
            seen.clear()
            fake_score(x, judged, batch.condition)
            logits[name] = head(seen[0])[:, 0]
    handle.remove()
    denoising = ((prediction.velocity - (eps - made)) ** 2).flatten(1).mean(1).mean()
    classifier = softplus(-logits["real"]) + softplus(logits["made"])
    if with_r1:
        classifier = classifier + R1_WEIGHT * (logits["real"] - logits["moved"]) ** 2
    return denoising, classifier.mean()


@pytest.mark.parametrize("r1", [{}, R1], ids=["plain", "r1"])
def test_both_losses_reach_head_and_network_as_autograd_says(
    make_worker: MakeWorker, storage: str, r1: dict[str, Any]
) -> None:
    worker = make_worker(storage, JOINT, r1)
    loss = phase_loss(worker, "fake_score")
    ours = gradients(worker, "fake_score")
    tensors = worker.roles["fake_score"].parameters
    denoising, classifier = written_out(worker, bool(r1))
    torch.testing.assert_close(loss.loss, denoising + WEIGHT * classifier)
    torch.testing.assert_close(loss.metrics["denoising_loss"], denoising)
    with worker.roles.use("fake_score"):
        whole = denoising + WEIGHT * classifier
        exact = torch.autograd.grad(whole, list(tensors.values()), retain_graph=True)
        alone = torch.autograd.grad(classifier, list(tensors.values()), allow_unused=True)
    assert ours.keys() == tensors.keys()
    for key, expected in zip(tensors, exact, strict=True):
        torch.testing.assert_close(ours[key], expected, msg=key)
    # The classifier shapes what it looks at, and not only a little.
    network = [
        float(gradient.norm() / expected.norm())
        for key, gradient, expected in zip(tensors, alone, exact, strict=True)
        if gradient is not None and key not in of_head(tensors)
    ]
    assert max(network) > 0.05


def test_the_head_is_a_part_of_the_fake_score(make_worker: MakeWorker, storage: str) -> None:
    worker = make_worker(storage, JOINT)
    roles, head = worker.roles, worker.roles.storage.networks["discriminator"]
    assert "discriminator" not in roles
    assert worker.method.trained_roles == ("student", "fake_score")
    own = of_head(roles["fake_score"].parameters)
    assert [id(p) for p in own.values()] == [id(p) for p in head.parameters()]
    for role in ("student", "fake_score"):
        phase_loss(worker, role)
        roles.check_gradients(role)
        mine = {id(p) for p in roles[role].tensors}
        for network in roles.storage.networks.values():
            assert all(p.grad is None for p in network.parameters() if id(p) not in mine)
        worker._clear_gradients(roles[role])
    optimizer = roles["fake_score"].optimizer
    assert optimizer is not None
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in roles["fake_score"].tensors}


def test_a_head_without_a_gradient_is_noticed(
    make_worker: MakeWorker, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(storage, JOINT)
    classify = Adversary._classify
    monkeypatch.setattr(Adversary, "_classify", lambda *a, **k: classify(*a, **k).detach())
    with pytest.raises(TrainingError, match=r"no gradient to .* discriminator\.\.readers\.0"):
        worker.run_phase(FAKE)


def test_one_network_call_gives_both_losses(make_worker: MakeWorker) -> None:
    worker = make_worker("independent", JOINT, R1)
    x0 = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    with spying(worker.roles.model) as calls:
        phase_loss(worker, "fake_score", {"x0": x0})
    ((x, sigma),) = calls
    _, real, made, moved = x.chunk(4)
    levels = sigma.chunk(4)
    assert levels[1].equal(levels[2])
    assert levels[1].equal(levels[3])
    assert not torch.equal(levels[0], levels[1])
    ids = torch.arange(4)
    delta = Draw(3, 1, "fake_score").normal("r1_delta", ids, x.shape[1:], x.dtype)
    torch.testing.assert_close(moved - real, STD * delta)
    assert not torch.allclose(made, real)


def test_the_student_is_given_what_a_head_of_its_own_would_say(
    make_worker: MakeWorker, storage: str
) -> None:
    """The weights are the same in both: the head's are moved last."""
    found = []
    for change in ({}, JOINT):
        worker = make_worker(storage, change)
        loss = phase_loss(worker, "student")
        found.append((loss, gradients(worker, "student")))
    (alone, expected), (joint, ours) = found
    assert torch.equal(alone.loss, joint.loss)
    assert torch.equal(alone.metrics["generator_loss"], joint.metrics["generator_loss"])
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    "change", [{"train.micro_batch_size": 3}, {"runtime.activation_checkpointing": True}]
)
def test_micro_batches_and_recomputed_blocks_change_nothing(
    make_worker: MakeWorker, storage: str, change: dict[str, Any]
) -> None:
    size = {"train.batch_size": 8}
    whole, other = (
        make_worker(storage, JOINT, R1, size),
        make_worker(storage, JOINT, R1, size, change),
    )
    expected, result = whole.run_phase(FAKE).metrics, other.run_phase(FAKE).metrics
    assert result == pytest.approx(expected)
    assert {"denoising_loss", "classifier_loss", "accuracy", "r1"} <= result.keys()
    for key, parameter in whole.roles["fake_score"].parameters.items():
        torch.testing.assert_close(other.roles["fake_score"].parameters[key], parameter)


# Runs


def test_two_and_two_cycles_are_four_bit_for_bit(
    make_recipe: Callable[..., Any],
    tmp_path: Path,
    ten_images: Dataset,
    storage: str,
    flat_state: Callable[..., Any],
    assert_equal_states: Callable[..., None],
    no_sync: None,
) -> None:
    changes = {**ON, **JOINT, **R1, "storage": storage}

    def train(name: str, **arguments: Any) -> Any:
        recipe = make_recipe("dmd2", {**changes, "run_dir": str(tmp_path / name)})
        return fewstep.train(recipe, data=ten_images, **arguments)

    whole, parts = map(flat_state, run_in_two_parts(train))
    assert_equal_states(whole, parts)
    assert any(key.startswith("/networks/discriminator/") for key in whole)
    assert any(key.startswith("/optimizers/fake_score/discriminator..join") for key in whole)
    assert not any(key.startswith("/optimizers/discriminator/") for key in whole)
    opened = fewstep.open_run(tmp_path / "whole")
    assert "discriminator" not in opened.roles
    assert opened.sample(2).images.shape == (2, 1, 4, 4)


def test_weight_zero_is_off_bit_for_bit(
    make_recipe: Callable[..., Any],
    tmp_path: Path,
    flat_state: Callable[..., Any],
    assert_equal_states: Callable[..., None],
    no_sync: None,
) -> None:
    off = {"method.adversarial": {"generator_weight": 0.0, "trained_with": "fake_score"}}
    found = []
    for name, changes in (("plain", {}), ("off", off)):
        recipe = make_recipe("dmd2", {"run_dir": str(tmp_path / name), **changes})
        with spying(recipe.model.build()) as calls:
            run = fewstep.train(recipe)
        assert set(run.roles.storage.networks) == set(run.roles)
        found.append((flat_state(run), len(calls)))
    assert_equal_states(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"optimizers.discriminator": {"lr": 0.01}},
            "optimizers.discriminator: method.adversarial.trained_with is 'fake_score', so "
            "optimizers.fake_score trains the classifier as well; leave it out",
        ),
        (
            {"method.adversarial.features_from": "teacher_score"},
            "method.adversarial: features_from is 'teacher_score', but trained_with is",
        ),
        (
            {"method.adversarial.r1": {"weight": 1.0, "kind": "exact"}},
            "method.adversarial: r1.kind is 'exact'",
        ),
        (
            {"parallel.kind": "fsdp1", "storage": "shared_base"},
            "method.adversarial: parallel.kind 'fsdp1' cannot run a backward pass",
        ),
        ({"data.name": "none"}, "data.name: the classifier, method.adversarial, trains on data"),
        ({"method.adversarial.trained_with": "student"}, "method.adversarial.trained_with: "),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    make_recipe: Callable[..., Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_recipe("dmd2", {**ON, **JOINT, **changes})
    assert said in str(caught.value)
