"""Rollout engines make the trainer's samples; weights arrive whole, or it is noticed."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import multiprocessing
import os
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fewstep
from fewstep.build import build_roles, build_storage, build_worker, seeded
from fewstep.config import Recipe, parse_recipe
from fewstep.data.batches import Batch, ConditionBatches
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.samplers import sample_few_step
from fewstep.errors import TrainingError, UserError
from fewstep.export import export_run
from fewstep.methods.dmd2 import DMD2
from fewstep.methods.method import Rollout
from fewstep.models.model import Model
from fewstep.models.module import ModuleModel
from fewstep.parallel.ranks import CPU, SINGLE, Ranks
from fewstep.parallel.sharding import build_sharding, spread
from fewstep.pipeline_engine import PipelineEngine, build_engine
from fewstep.pretrained import load_weights
from fewstep.rollout import RolloutEngine, StudentEngine
from fewstep.training.worker import Worker
from fewstep.weights import (
    Checksum,
    Confirmation,
    canonical_names,
    gather_bucket,
    split_into_buckets,
    student_tensors,
    whole_sizes,
    without_adapter,
)

STEPS = 3
ROLES = ("student", "fake_score", "teacher_score", "student_ema")
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "fsdp1": {"kind": "fsdp1"},
    "fsdp2": {"kind": "fsdp2"},
    "copies1": {"kind": "fsdp1", "shard_size": 1},
    "copies2": {"kind": "fsdp2", "shard_size": 1},
}
NETWORKS = ("shared_base", "odd")
both_storages = pytest.mark.parametrize("storage", ["independent", "shared_base"])
both_transitions = pytest.mark.parametrize("transition", ["renoise", "euler"])


class Odd(nn.Module):
    """Tied weights, buffers of two kinds, sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([first, nn.Linear(5, 5)])
        self.enter, self.leave, self.tied = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 5)
        self.tied.weight = first.weight
        self.register_buffer("offset", torch.arange(5) * 0.1)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("order", torch.arange(5).flip(0), persistent=False)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        h: Tensor = self.enter(torch.cat([x, sigma[:, None].to(x.dtype)], dim=1))
        for block in self.blocks:
            h = h + torch.tanh(block(h) + self.get_buffer("offset"))
        return cast(Tensor, self.leave(self.tied(h)[:, self.get_buffer("order")]))


def make_recipe(storage: str, **changes: Any) -> Recipe:
    optimizer = {"lr": 0.01}
    network = {
        "sample_size": 4,
        "patch_size": 2,
        "num_layers": 2,
        "num_attention_heads": 1,
        "attention_head_dim": 8,
        "num_embeds_ada_norm": 3,
    }
    values: dict[str, Any] = {
        "seed": 3,
        "model": {"family": "dit", "network": network},
        "method": {"name": "dmd2", "steps": STEPS, "shift": 3.0},
        "storage": storage,
        "optimizers": {"student": optimizer, "fake_score": optimizer},
        "ema": {"decay": 0.5},
        "train": {"cycles": 2, "batch_size": 6},
        "logging": {"teacher_samples": 2, "tensorboard": False},
    }
    if storage == "shared_base":
        values["lora"] = {"rank": 2}
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_recipe(values)


@torch.no_grad()
def build_trainer(
    recipe: Recipe, model: Model, ranks: Ranks = SINGLE, names: tuple[str, ...] = ROLES
) -> Worker:
    """A worker whose roles all differ, and are the same however they are cut."""
    with seeded(recipe.seed, "network"):  # as `load_weights` does
        teacher = model.build_network()
    with seeded(recipe.seed, "roles"):
        storage = build_storage(recipe, model, teacher, names)
    for role in names:
        if role == "teacher_score":
            continue
        for key, parameter in storage.parameters(role).items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{role}/{key}".encode()))
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    sharding = build_sharding(recipe.parallel, ranks, None)
    dtype = recipe.runtime.torch_dtype
    spread(storage, sharding, model.blocks, None, dtype=dtype)
    roles = build_roles(recipe, model, storage, names, ranks.device, sharding)
    sharding.wrap(storage, names, [name for name, role in roles.items() if role.trainable])
    batches = ConditionBatches(model.classes, ranks.device)
    method = recipe.method.build()
    return Worker(recipe.seed, recipe.train, method, roles, batches, sharding)


def build_receiver(recipe: Recipe, model: Model) -> Worker:
    return build_worker(recipe, model, None, load_weights(recipe, model), roles=("student",))


def build_both(recipe: Recipe) -> tuple[Worker, StudentEngine]:
    """A trainer, and an engine that has not been sent anything."""
    model = recipe.model.build()
    return build_trainer(recipe, model), StudentEngine(build_receiver(recipe, model).roles)


def push(worker: Worker, engine: RolloutEngine, role: str = "student") -> Confirmation:
    """Send a role's weights in small portions; what the sender has hashed."""
    checksum = Checksum()
    for names in split_into_buckets(whole_sizes(worker, role), 300):
        bucket = gather_bucket(worker, role, names)
        engine.load_weights(bucket)
        for name, tensor in bucket.items():
            checksum.add(name, tensor)
    return checksum.confirmation(1)


def draws() -> Iterator[Draw]:
    """One draw for every exit step."""
    for step in range(STEPS):
        some = (Draw(3, cycle, "student") for cycle in itertools.count(1))
        yield next(d for d in some if d.choice("exit", STEPS) == step)


def batch_of(model: Model, count: int = 6) -> Batch:
    return Batch(torch.arange(count), model.example_condition(count))


def rollouts(worker: Worker) -> Iterator[tuple[Rollout, Tensor]]:
    """What is asked of an engine, and what the trainer makes by itself."""
    method, roles = worker.method, worker.roles
    assert isinstance(method, DMD2)
    batch = batch_of(roles.model)
    for draw in draws():
        with torch.no_grad():
            x0 = method.generate(roles, method.simulate(roles, batch, draw))
        yield method.rollout(roles.model, batch, draw, roles.dtype), x0


# The student's own engine


@both_storages
@both_transitions
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_samples_are_the_trainers_bit_for_bit(storage: str, transition: str, dtype: str) -> None:
    recipe = make_recipe(storage, runtime={"dtype": dtype}, method={"transition": transition})
    trainer, engine = build_both(recipe)
    rollout, x0 = next(rollouts(trainer))
    assert not torch.allclose(engine.generate(rollout), x0, atol=1e-3)
    sent = push(trainer, engine)
    assert engine.bound(1) == sent
    lengths = []
    for rollout, x0 in rollouts(trainer):
        made = engine.generate(rollout)
        assert torch.equal(made, x0)
        assert made.dtype == getattr(torch, dtype)
        assert not made.requires_grad
        lengths.append(len(rollout.sigmas))
    assert lengths == [1, 2, 3]


@both_storages
def test_the_average_can_take_the_students_place(storage: str) -> None:
    recipe = make_recipe(storage)
    trainer, engine = build_both(recipe)
    assert push(trainer, engine, "student_ema") == engine.bound(1)
    rollout, by_student = list(rollouts(trainer))[2]
    made, noise = engine.generate(rollout), rollout.noise
    with torch.no_grad(), trainer.roles.use("student_ema") as average:
        x0 = sample_few_step(
            lambda x, sigma: average(x, sigma, rollout.condition),
            noise[:, 0],
            rollout.sigmas,
            rollout.transition,
            lambda step: noise[:, step],
        )
    assert torch.equal(made, x0)
    assert not torch.allclose(made, by_student, atol=1e-3)
    assert push(trainer, engine, "student") == engine.bound(1)
    assert torch.equal(engine.generate(rollout), by_student)


@both_storages
def test_sleep_gives_memory_back_and_wake_brings_the_weights(storage: str) -> None:
    recipe = make_recipe(storage)
    trainer, engine = build_both(recipe)
    sent = push(trainer, engine)
    rollout, x0 = next(rollouts(trainer))
    engine.sleep()
    for use in (
        lambda: engine.generate(rollout),
        lambda: engine.bound(1),
        lambda: engine.load_weights({}),
    ):
        with pytest.raises(TrainingError, match="wake"):
            use()
    held = engine.roles.storage.networks[engine.roles.storage.network_of("student")]
    # Memory that was given away cannot be written to.
    with pytest.raises(RuntimeError):
        next(held.parameters()).data.zero_()
    engine.wake()
    assert engine.bound(1) == sent
    assert torch.equal(engine.generate(rollout), x0)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("pos_embed.proj.wait", lambda t: t, "'pos_embed.proj.wait' is no tensor"),
        ("proj_out_2.bias", lambda t: t[:-1], r"'proj_out_2.bias' has shape .*\[3\].*\[4\]"),
        ("proj_out_2.bias", lambda t: t.double(), "'proj_out_2.bias' has dtype torch.float64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_taken(
    name: str, change: Callable[[Tensor], Tensor], problem: str
) -> None:
    recipe = make_recipe("independent")
    model = recipe.model.build()
    engine = StudentEngine(build_receiver(recipe, model).roles)
    before = engine.bound(0)
    good = dict.fromkeys(["proj_out_1.bias"], torch.ones(16))
    with pytest.raises(TrainingError, match=problem):
        engine.load_weights({**good, name: change(torch.ones(4))})
    assert engine.bound(0) == before
    engine.load_weights(good)
    assert engine.bound(0) != before


@both_storages
def test_weights_that_reach_no_network_are_noticed(storage: str) -> None:
    recipe = make_recipe(storage)
    trainer, engine = build_both(recipe)
    networks = engine.roles.storage.networks
    # The network that is called is another than the one that takes the weights.
    name = engine.roles.storage.network_of("student")
    networks[name] = copy.deepcopy(networks[name])
    sent, held = push(trainer, engine), engine.bound(1)
    assert held.tensors == sent.tensors
    assert held.checksum != sent.checksum


def test_one_tensor_that_was_left_out_is_noticed() -> None:
    recipe = make_recipe("shared_base")
    trainer, engine = build_both(recipe)
    sent = Checksum()
    names = list(whole_sizes(trainer, "student"))
    for name, tensor in gather_bucket(trainer, "student", names).items():
        sent.add(name, tensor)
        if name != names[5]:
            engine.load_weights({name: tensor})
    assert engine.bound(1) != sent.confirmation(1)


# Names, portions, checksums


@both_storages
def test_names_are_the_same_for_student_and_average_and_at_the_receiver(storage: str) -> None:
    recipe = make_recipe(storage)
    model = recipe.model.build()
    sender, receiver = build_trainer(recipe, model).roles, build_receiver(recipe, model).roles
    names = list(canonical_names(sender.storage, "student"))
    assert names == list(canonical_names(sender.storage, "student_ema"))
    assert names == list(student_tensors(receiver, "student"))
    assert not any("student" in name for name in names)
    expected = len(sender["student"].parameters)
    assert len(names) == expected > 0 if storage == "shared_base" else len(names) >= expected


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("block.0.to_q.lora_A.student.weight", "block.0.to_q.lora_A.weight"),
        ("student.fc.lora_B.student_ema.weight", "student.fc.lora_B.weight"),
        ("words.lora_embedding_A.student", "words.lora_embedding_A"),
        ("lora_mixer.student.fc.lora_A.student.weight", "lora_mixer.student.fc.lora_A.weight"),
    ],
)
def test_the_adapters_name_alone_is_left_out(key: str, name: str) -> None:
    assert without_adapter(key) == name


def test_tied_weights_are_sent_once_and_buffers_too() -> None:
    recipe, model = make_recipe("independent"), ModuleModel(Odd, (2,))
    sender = build_trainer(recipe, model)
    names = list(whole_sizes(sender, "student"))
    assert "blocks.0.weight" in names
    assert "tied.weight" not in names
    assert {"offset", "count"} <= set(names)
    assert "order" not in names
    engine = StudentEngine(build_receiver(recipe, model).roles)
    sender.roles.storage.tensors["student"]["offset"].add_(1.5)
    assert push(sender, engine) == engine.bound(1)
    for rollout, x0 in rollouts(sender):
        assert torch.equal(engine.generate(rollout), x0)


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([], 4, []),
        ([4], 4, [[0]]),
        ([1, 3, 1], 4, [[0, 1], [2]]),
        ([1, 9, 1, 1], 4, [[0], [1], [2, 3]]),
        ([9, 9], 4, [[0], [1]]),
        ([2, 3, 2], 4, [[0], [1], [2]]),
        ([0, 4, 0, 0, 1], 4, [[0, 1, 2, 3], [4]]),
    ],
)
def test_portions_are_as_large_as_may_be(
    sizes: list[int], limit: int, buckets: list[list[int]]
) -> None:
    named = {str(index): size for index, size in enumerate(sizes)}
    assert split_into_buckets(named, limit) == [[str(i) for i in b] for b in buckets]


def test_a_checksum_is_sha256_of_what_the_tensors_are() -> None:
    found = Checksum()
    found.add("a", torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    found.add("b/c", torch.tensor([[1], [256]]).T)
    found.add("none", torch.zeros(0, 2))
    found.add("one", torch.tensor(True))
    text = (
        b'["a", "torch.bfloat16", [2]]\n\x80\x3f\x00\x40'
        b'["b/c", "torch.int64", [1, 2]]\n\x01\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0'
        b'["none", "torch.float32", [0, 2]]\n'
        b'["one", "torch.bool", []]\n\x01'
    )
    assert found.hexdigest() == hashlib.sha256(text).hexdigest()
    assert found.confirmation(7) == Confirmation(7, found.hexdigest(), 4)


def test_a_checksum_tells_tensors_apart_that_share_their_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    flipped = tensor.clone()
    flipped[3] += 1
    variants = [
        [("a", tensor)],
        [("b", tensor)],
        [("a", flipped)],
        [("a", tensor.view(torch.float32))],
        [("a", tensor.view(2, 3))],
        [("a", tensor), ("b", tensor[:0])],
        [("a", tensor[:3]), ("b", tensor[3:])],
        [("b", tensor[3:]), ("a", tensor[:3])],
    ]
    sums = []
    for variant in variants:
        checksum = Checksum()
        for name, part in variant:
            checksum.add(name, part)
        sums.append(checksum.hexdigest())
    assert len(set(sums)) == len(variants)


# Senders of two ranks


def gathered(network: str, kind: str, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a sender gathers of a student and its average, and what it says of them."""
    storage = "shared_base" if network == "shared_base" else "independent"
    recipe = make_recipe(storage, parallel=KINDS.get(kind, {}))
    model = ModuleModel(Odd, (2,)) if network == "odd" else recipe.model.build()
    worker = build_trainer(recipe, model, ranks)
    # After a pass, as in a run: FSDP1 has its rows cut again by then.
    with torch.no_grad(), worker.roles.use("student") as student:
        batch = batch_of(model)
        student(torch.zeros(6, *model.sample_shape), torch.ones(6), batch.condition)
    tensors: dict[str, Tensor] = {}
    said: dict[str, Any] = {}
    for role in ("student", "student_ema"):
        checksum, sizes = Checksum(), whole_sizes(worker, role)
        buckets = split_into_buckets(sizes, 500)
        for names in buckets:
            for name, tensor in gather_bucket(worker, role, names).items():
                assert tensor.device.type == "cpu"
                assert tensor.is_contiguous()
                checksum.add(name, tensor)
                tensors[f"{role}/{name}"] = tensor
        said[role] = [checksum.hexdigest(), checksum.count, sizes, len(buckets)]
    return tensors, said


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that have gathered every kind of student."""
    out = tmp_path_factory.mktemp("gathered")
    # Forked: they need not import torch again.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=be_rank, args=(rank, out)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        process.kill()
    failures = [file.read_text() for file in out.glob("*.error")]
    assert not failures, failures
    return out


def be_rank(rank: int, out: Path) -> None:
    """Gather every kind of student together with the other rank, and end."""
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=2
        )
        for network, kind in itertools.product(NETWORKS, KINDS):
            tensors, said = gathered(network, kind, Ranks(rank, 2, CPU, grouped=True))
            save_file(tensors, out / f"{network}-{kind}-{rank}.safetensors")
            (out / f"{network}-{kind}-{rank}.json").write_text(json.dumps(said))
    except BaseException:
        (out / f"{rank}.error").write_text(traceback.format_exc())
    os._exit(0)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_gather_what_one_process_has(launched: Path, network: str, kind: str) -> None:
    tensors, said = gathered(network, "alone", SINGLE)
    for rank in range(2):
        found = load_file(launched / f"{network}-{kind}-{rank}.safetensors")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor), name
        assert json.loads((launched / f"{network}-{kind}-{rank}.json").read_text()) == said
    assert said["student"][0] != said["student_ema"][0]
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    assert said["student"][2] == {
        name.removeprefix("student/"): size
        for name, size in sizes.items()
        if name.startswith("student/")
    }


def test_what_is_gathered_does_not_follow_the_students_next_update() -> None:
    recipe = make_recipe("independent")
    worker = build_trainer(recipe, recipe.model.build())
    bucket = gather_bucket(worker, "student", ["proj_out_2.bias"])
    before = bucket["proj_out_2.bias"].clone()
    with torch.no_grad():
        worker.roles["student"].parameters["proj_out_2.bias"].add_(1)
    assert torch.equal(bucket["proj_out_2.bias"], before)


# Through a pipeline of diffusers


def pipeline_recipe(storage: str = "independent", **changes: Any) -> Recipe:
    return make_recipe(storage, rollout={"engine": "pipeline"}, **changes)


@both_transitions
def test_a_pipeline_makes_the_students_samples(transition: str) -> None:
    recipe = pipeline_recipe(method={"transition": transition})
    model = recipe.model.build()
    trainer, engine = (
        build_trainer(recipe, model),
        build_engine(recipe, build_receiver(recipe, model)),
    )
    assert isinstance(engine, PipelineEngine)
    rollout, x0 = next(rollouts(trainer))
    assert not torch.allclose(engine.generate(rollout), x0, atol=1e-3)
    assert push(trainer, engine) == engine.bound(1)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for rollout, x0 in rollouts(trainer):
        made = engine.generate(rollout)
        torch.testing.assert_close(made, x0, rtol=0, atol=2e-5 * float(x0.abs().max()))
        assert made.dtype == x0.dtype
    assert torch.equal(torch.get_rng_state(), state)
    engine.sleep()
    with pytest.raises(TrainingError, match="wake"):
        engine.generate(rollout)
    engine.wake()
    assert torch.equal(engine.generate(rollout), made)


def test_a_pipeline_computes_in_the_dtype_of_the_recipe() -> None:
    recipe = pipeline_recipe(runtime={"compute_dtype": "bfloat16"})
    model = recipe.model.build()
    student = StudentEngine(build_receiver(recipe, model).roles)
    pipeline = build_engine(recipe, build_receiver(recipe, model))
    exact = build_engine(pipeline_recipe(), build_receiver(pipeline_recipe(), model))
    rollout = recipe.method.build().rollout(model, batch_of(model), next(draws()), torch.float32)
    made, wanted, other = (e.generate(rollout) for e in (pipeline, student, exact))
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(other, wanted, rtol=0, atol=1e-4)
    assert made.dtype == torch.float32


def test_an_engine_over_an_export_makes_the_runs_samples(tmp_path: Path) -> None:
    recipe = make_recipe("shared_base", run_dir=str(tmp_path / "run"))
    run = fewstep.train(recipe)
    directory = export_run(run, tmp_path / "export", "student")
    engine = PipelineEngine(directory)
    for rollout, x0 in rollouts(run.worker):
        made = engine.generate(rollout)
        torch.testing.assert_close(made, x0, rtol=0, atol=2e-5 * float(x0.abs().max()))


def test_a_pipeline_that_was_exchanged_is_noticed() -> None:
    recipe = pipeline_recipe()
    model = recipe.model.build()
    trainer, engine = (
        build_trainer(recipe, model),
        build_engine(recipe, build_receiver(recipe, model)),
    )
    assert isinstance(engine, PipelineEngine)
    engine.pipeline.transformer = copy.deepcopy(engine.pipeline.transformer)
    assert push(trainer, engine).checksum != engine.bound(1).checksum


def test_a_pipeline_refuses_another_transition() -> None:
    recipe = pipeline_recipe(method={"transition": "euler"})
    model = recipe.model.build()
    engine = build_engine(recipe, build_receiver(recipe, model))
    noise, condition = torch.zeros(3, 2, 1, 4, 4), model.example_condition(3)
    with pytest.raises(TrainingError, match="for 'euler', but samples by 'renoise'"):
        engine.generate(Rollout(noise, (1.0, 0.5), "renoise", condition))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"storage": "shared_base"}, "needs storage 'independent'.*'shared"),
        ({"runtime": {"dtype": "float64"}}, "runtime.dtype is 'float64'"),
        ({"model": {"prediction": "x0"}}, "model.prediction is 'x0'"),
        ({"model": {"timestep_scale": 1.0}}, "model.timestep_scale is 1"),
    ],
)
def test_a_pipeline_is_refused_where_it_cannot_sample(
    changes: dict[str, Any], problem: str
) -> None:
    recipe = pipeline_recipe(**changes)
    with pytest.raises(UserError, match=f"rollout.engine: 'pipeline'.*{problem}"):
        build_engine(recipe, build_receiver(recipe, recipe.model.build()))
