"""Memory that is counted before anything is loaded, against what real networks take."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from sd3_pipeline import TINY_SD3, write_tiny_pipeline
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fewstep import load_recipe, memory_tables
from fewstep.activations import Kept, kept_by_exact_r1, kept_by_forward
from fewstep.budget import Estimator, samples_of, spread_of, structure_of
from fewstep.build import build_worker
from fewstep.config import parse_recipe
from fewstep.decoding import image_bytes
from fewstep.diffusion.gan import exact_r1
from fewstep.errors import UserError
from fewstep.launch.processes import check_launch
from fewstep.memory import (
    GIGABYTE,
    Devices,
    Held,
    RankMemory,
    Spread,
    gradient_bytes,
    local_numbers,
    on_one_device,
    parse_devices,
    rank_memory,
    unit_bytes,
)
from fewstep.models.block_features import FeatureExtractor, feature_widths, select_blocks
from fewstep.models.classifier import ClassifierHead
from fewstep.models.dit import DiT, DiTNetwork
from fewstep.models.encoders import Decoder
from fewstep.models.model import Denoiser, Model
from fewstep.models.module import ModuleModel
from fewstep.parallel.compute import recompute_in_backward
from fewstep.parallel.ranks import SINGLE
from fewstep.parallel.settings import LaunchSettings
from fewstep.pretrained import load_weights, resolve_recipe
from fewstep.remedies import remedies
from fewstep.training.loop import run_cycle

ROOT = Path(__file__).parents[1]
SD35 = ROOT / "recipes/sd35_medium"
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
PAGE = ROOT / "docs/models/sd35.md"


@pytest.mark.parametrize(
    ("text", "count", "size"),
    [
        ("1x80GB", 1, 80 * 10**9),
        ("8x24GiB", 8, 24 * 2**30),
        ("2x0.5TB", 2, 5 * 10**11),
        ("16x512MiB", 16, 2**29),
    ],
)
def test_devices_are_read(text, count, size) -> None:
    assert parse_devices(text) == Devices(count, size)


@pytest.mark.parametrize(
    "text",
    [
        *("", "80GB", "1x80", "1x80gb", "1X80GB", "0x80GB", "1x0GB", "-1x80GB", "1x80GB "),
        *("1.5x80GB", "1x80GBs", "1 x 80GB", "1x-80GB", "axb", "1x1e3GB", "1x80 GB", "1x.5GB"),
    ],
)
def test_other_devices_are_refused(text) -> None:
    with pytest.raises(UserError, match=re.escape(f"--gpus: {text!r} is given; it should be")):
        parse_devices(text)


def plain(tensors: list[Tensor]) -> int:
    """Bytes of tensors, each with memory of its own."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert len(storages) == len(tensors)
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_rank_alone_keeps_just_what_is_counted(make_recipe, storage, dtype) -> None:
    changes = {"storage": storage, "runtime.dtype": dtype}
    recipe = resolve_recipe(make_recipe("dmd2", changes))
    counted = Estimator(recipe).on(1)
    model = recipe.model.build()
    worker = build_worker(recipe, model, None, load_weights(recipe, model))
    run_cycle(worker, 1, 2, recipe.cycle)
    roles, networks = worker.roles, worker.roles.storage.networks.values()
    trained = [t for role in ("student", "fake_score") for t in roles[role].tensors]
    frozen = [t for role in ("teacher_score", "student_ema") for t in roles[role].tensors]
    states = [
        value
        for role in ("student", "fake_score")
        for state in roles[role].optimizer.state.values()
        for value in state.values()
    ]
    assert counted.trained == plain(trained)
    assert counted.frozen == plain(frozen)
    assert counted.optimizer == plain(states)
    assert counted.buffers == plain([b for network in networks for b in network.buffers()])
    assert counted.gradients == max(
        plain(roles[role].tensors) for role in ("student", "fake_score")
    )
    assert counted.units == counted.communication == counted.main_memory == 0


def test_a_classifier_counts_for_the_role_that_it_is_trained_with(make_recipe, storage) -> None:
    def counted(trained_with: str, optimizer: dict[str, float] | None) -> RankMemory:
        head = {"trained_with": trained_with, "r1": {"weight": 1.0}}
        changes = {"method.adversarial": head, "optimizers.discriminator": optimizer}
        changes |= {"data.name": "custom", "storage": storage}
        return Estimator(resolve_recipe(make_recipe("dmd2", changes))).on(1)

    alone, joint = counted("discriminator", {"lr": 0.01}), counted("fake_score", None)
    assert joint.trained == alone.trained
    assert joint.optimizer == alone.optimizer
    # The fake score is as large as the student; now the head is trained together with it.
    student = Estimator(resolve_recipe(make_recipe("dmd2", {"storage": storage}))).on(1)
    head = alone.trained - student.trained
    assert joint.gradients == student.gradients + head
    # Denoised, real, made and moved samples have graphs together.
    assert joint.activations > alone.activations


def saved_bytes(model: Model, network: nn.Module, samples: int, inside: nn.Module) -> int:
    """Bytes that a real forward pass keeps, weights aside."""
    x, condition = torch.randn(samples, *model.sample_shape), model.example_condition(samples)
    return kept_by(lambda: model.forward(network, x, torch.rand(samples), condition), inside)


def kept_by(compute: Callable[[], object], *inside: nn.Module) -> int:
    """Bytes that autograd keeps of what is really computed, weights aside."""
    weights = {
        t.untyped_storage().data_ptr()
        for network in inside
        for t in (*network.parameters(), *network.buffers())
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for storage in kept.values())


def empty(model: Model) -> nn.Module:
    """A network without memory."""
    with torch.device("meta"):
        return model.build_network()


@pytest.fixture
def deep_model() -> DiT:
    """Five layers, four of which are blocks that are alike."""
    return DiT(
        DiTNetwork(
            sample_size=8, in_channels=2, num_layers=5, num_attention_heads=2, attention_head_dim=8
        )
    )


@pytest.mark.parametrize("samples", [1, 3])
def test_what_a_forward_pass_keeps_is_counted_to_the_byte(deep_model, samples) -> None:
    network = deep_model.build_network()
    real = saved_bytes(deep_model, network, samples, network)
    for counted in (network, empty(deep_model)):
        assert kept_by_forward(deep_model, counted, samples, torch.float32).everything == real


def test_a_block_keeps_what_all_have_more_than_one_less(deep_model) -> None:
    def bytes_of(layers: int) -> Kept:
        model = DiT(deep_model.config.model_copy(update={"num_layers": layers}))
        return kept_by_forward(model, empty(model), 2, torch.float32)

    (four, five) = (bytes_of(4), bytes_of(5))
    tokens, width = 2 * 16, 16
    # A block's input is that of the next one's norm, too: counted with the block that gets it.
    assert five.everything - four.everything == five.block + tokens * width * 4
    assert five.checkpointed - four.checkpointed == tokens * width * 4


def test_with_checkpointing_inputs_are_kept_and_one_block(deep_model) -> None:
    network = deep_model.build_network()
    kept = kept_by_forward(deep_model, network, 2, torch.float32)
    recompute_in_backward(deep_model.blocks(network).values())
    real = saved_bytes(deep_model, network, 2, network)
    # A checkpoint holds the timesteps, two numbers, whether or not anything is kept of them.
    assert real <= kept.checkpointed <= real + 2 * 4
    assert kept.activations(True, 1) == kept.checkpointed + kept.block
    assert kept.activations(False, 3) == kept.everything + 3 * kept.block
    assert kept.activations(True, 1, graphs=2) == 2 * kept.checkpointed + kept.block


@pytest.mark.parametrize("name", [None, "transformer_blocks.4"])
def test_what_exact_r1_keeps_is_counted_to_the_byte(deep_model, name: str | None) -> None:
    names = None if name is None else [name]
    network, model = deep_model.build_network().requires_grad_(False), deep_model
    head = ClassifierHead(feature_widths(model, network, names))
    x, sigma, condition = torch.randn(3, 2, 8, 8), torch.rand(3), model.example_condition(3)
    denoiser = Denoiser(model, network, check_active=lambda: None)
    features = FeatureExtractor(denoiser, select_blocks(model, network, names))

    def differentiate() -> None:
        exact_r1(lambda x: features(x, sigma, condition), lambda tokens: head(*tokens)[:, 0], x)

    real = kept_by(differentiate, network, head)
    with torch.device("meta"):
        counted = empty(model).requires_grad_(False), ClassifierHead([16])
    assert kept_by_exact_r1(model, *counted, names, 3, torch.float32) == real


def test_exact_r1_counts_with_or_without_recomputing(make_recipe) -> None:
    def estimated(kind: str, recompute: bool, more: dict[str, Any] | None = None) -> Estimator:
        head = {"r1": {"kind": kind, "weight": 1.0}}
        changes = {"method.adversarial": head, "optimizers.discriminator": {"lr": 0.01}}
        changes |= {"data.name": "custom", "runtime.activation_checkpointing": recompute}
        changes |= {"model.network": {"sample_size": 32, "num_layers": 4}, **(more or {})}
        return Estimator(make_recipe("dmd2", changes))

    def needed(kind: str, recompute: bool) -> int:
        return estimated(kind, recompute).on(1).activations

    assert needed("exact", True) == needed("exact", False) > needed("approximate", False)
    assert needed("approximate", False) > needed("approximate", True)
    enough = Devices(1, estimated("approximate", True).on(1).total)
    found = [remedy.words for remedy in remedies(estimated("exact", True), enough)]
    assert "method.adversarial.r1.kind=approximate" in found
    cheap = {"runtime.compute_dtype": "bfloat16", "train.micro_batch_size": 1}
    enough = Devices(1, estimated("approximate", True, cheap).on(1).total)
    (joint,) = remedies(estimated("exact", False), enough)
    assert joint.words.endswith("train.micro_batch_size=1 method.adversarial.r1.kind=approximate")
    # Networks that are sharded cannot be differentiated twice.
    assert estimated("exact", True).on(2).units == 0 < estimated("approximate", True).on(2).units


class Perceptron(nn.Module):
    """Two layers and a function that keeps its input: the rules of autocast are alike for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        h: Tensor = self.second(nn.functional.silu(self.first(x)))
        return h + sigma[:, None].to(h.dtype)


@pytest.mark.parametrize("frozen", [False, True])
def test_under_autocast_copies_of_weights_are_told_apart(frozen) -> None:
    model = ModuleModel(Perceptron, (2,))
    network = model.build_network()
    network.first.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16):
        real = saved_bytes(model, network, 5, network)
    counted = empty(model)
    counted.first.requires_grad_(not frozen)
    kept = kept_by_forward(model, counted, 5, torch.float32, torch.bfloat16)
    # A layer keeps its weight to multiply gradients by; not the first, whose input needs none.
    multiplied_by = 0 if frozen else 64 * 2 * 2
    assert kept.everything + multiplied_by == real
    first, second = (64 * 2 + 64) * 2, (64 * 2 + 2) * 2
    assert kept.trained_copies == second + (0 if frozen else first)
    assert kept.frozen_copies == (first if frozen else 0)


def test_fsdp2_pads_the_first_dimension() -> None:
    from torch.distributed.tensor import Shard

    for rows in (1, 5, 8, 9):
        held = Held("net", "student", "", (rows, 3), 4, True)
        for ranks in (1, 2, 3, 8):
            parts, _ = Shard(0)._split_tensor(torch.zeros(rows, 3), ranks, with_padding=True)
            spread = Spread("fsdp2", ranks, ranks)
            assert local_numbers(held, spread) == parts[0].numel()
    assert local_numbers(Held("net", None, "", (9, 3), 4, False), Spread("fsdp2", 8, 8)) == 27
    assert local_numbers(Held("net", "student", "", (9, 3), 4, True), Spread("fsdp1", 8, 8)) == 4


def test_the_parts_of_a_sharded_rank_follow_the_page_on_scaling() -> None:
    """N = 800 in two units of 400, the student trained, on four ranks of which two share a copy."""
    held = [
        Held(net, net, unit, (40, 10), 4, net != "teacher_score")
        for net in ("student", "fake_score", "teacher_score")
        for unit in ("a", "b")
    ]
    spread = Spread("fsdp2", 4, 2, gathered_width=2)
    memory = rank_memory(held, spread)
    assert memory.trained == 2 * 800 * 4 // 2
    assert memory.frozen == 800 * 4 // 2
    assert memory.optimizer == 2 * 2 * 800 * 4 // 2 + 4 * 4
    assert memory.gradients == 800 * 4 // 2
    assert memory.units == unit_bytes(held, spread) == 400 * 2 * 7 // 2 + 400 * (2 + 4)
    assert gradient_bytes(held, replace(spread, whole_gradients=True)) == 800 * 4
    away = rank_memory(held, replace(spread, offload=True))
    assert away.kept == 0
    assert away.main_memory == memory.kept + memory.gradients
    for kind, sent in (("none", 800 * 4), ("ddp", 2 * 800 * 4)):
        whole = rank_memory(held, Spread(kind, 4))
        assert whole.communication == sent
        assert whole.trained == 2 * 800 * 4
        assert whole.units == 0


def test_groups_on_one_device_add_up_or_take_turns() -> None:
    critic = RankMemory(frozen=50, trained=50, optimizer=100, gradients=50, activations=10)
    actor = RankMemory(frozen=50, trained=50, optimizer=100, gradients=50, activations=70)
    both = on_one_device([critic, actor], 30, take_turns=False)
    assert both.kept == 2 * 200 + 30
    assert both.passing == 50 + 70
    turns = on_one_device([critic, actor], 30, take_turns=True)
    assert turns.needed == 200 + 50 + 70 + 30
    assert turns.main_memory == 200 + 30


def test_a_recipe_for_one_process_is_sharded_over_more(make_recipe) -> None:
    recipe = make_recipe("dmd2", {"train.batch_size": 8, "train.micro_batch_size": 2})
    assert spread_of(recipe, 1) == Spread("none", 1)
    assert spread_of(recipe, 4) == Spread("fsdp2", 4, 4)
    # With two ranks of four samples there are two micro-batches: gradients add up whole.
    assert spread_of(recipe, 2) == Spread("fsdp2", 2, 2, whole_gradients=True)
    assert [samples_of(recipe, n) for n in (1, 4, 8)] == [2, 2, 1]
    ddp = make_recipe("dmd2", {"train.batch_size": 8, "parallel.kind": "ddp"})
    assert spread_of(ddp, 4) == Spread("ddp", 4)
    copies = {"train.batch_size": 8, "launch.processes": 4}
    assert spread_of(make_recipe("dmd2", copies), 4) == Spread("none", 4)


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "largest"),
    [(32, None, 5, 7), (128, None, 6, 22), (32, 6, 5, 6), (5, 2, 2, 2), (5, 1, 4, 1)],
)
def test_the_fullest_rank_has_the_largest_share(
    make_recipe, batch: int, micro: int | None, ranks: int, largest: int
) -> None:
    changes = {"train.batch_size": batch, "train.micro_batch_size": micro}
    assert samples_of(make_recipe("dmd2", changes), ranks) == largest


def test_shards_that_do_not_divide_the_devices_are_refused(make_recipe) -> None:
    changes = {"train.batch_size": 8, "parallel": {"kind": "fsdp2", "shard_size": 4}}
    recipe = make_recipe("dmd2", changes)
    says = r"^parallel.shard_size: 4 does not divide the 6 ranks of this run$"
    with pytest.raises(UserError, match=says):
        memory_tables.plan_memory(recipe, Devices(6, 10**12))
    with pytest.raises(UserError, match=says):
        check_launch(recipe.model_copy(update={"launch": LaunchSettings(processes=6)}), False)
    # Of 1, 2 and 8 devices the last alone can be shown.
    shown, _ = memory_tables.plan_memory(recipe, None)
    assert [column.header for column in shown.renderables[2].columns] == ["what", "8 GPUs, fsdp2"]
    large = make_recipe("dmd2", {**changes, "train.batch_size": 2})
    with pytest.raises(UserError, match=r"^parallel.shard_size: 4 are given, but train.batch_size"):
        memory_tables.plan_memory(large, None)


def test_exact_r1_counts_for_the_group_that_classifies(make_recipe) -> None:
    scores = ["fake_score", "teacher_score", "discriminator"]
    head = {"r1": {"kind": "exact", "weight": 1.0}}
    changes = {
        "method.adversarial": head,
        "optimizers.discriminator": {"lr": 0.01},
        "data.name": "custom",
        "model.network": {"sample_size": 32, "num_layers": 4},
        "launch.kind": "ray",
        "cycle.order": "fake_score_first",
        "placement.offload": True,
        "placement.groups": {"critic": scores, "actor": ["student", "student_ema"]},
    }
    estimator = Estimator(make_recipe("dmd2", changes))
    memory, critic = estimator.on(1), estimator.held["critic"]
    # With one group awake at a time, what needs most is the critic with all that it holds.
    assert memory.activations > estimator.kept_by_exact_r1(2, estimator.recipe)
    held = sum(h.bytes for h in critic if h.role is not None and not h.trained)
    assert memory.frozen == held > 0


def test_networks_of_two_groups_are_counted_in_both(make_recipe) -> None:
    groups = {"critic": ["fake_score", "teacher_score"], "actor": ["student", "student_ema"]}
    changes = {"storage": "shared_base", "launch.kind": "ray", "cycle.order": "fake_score_first"}
    one = Estimator(make_recipe("dmd2", changes)).on(1)
    split = Estimator(make_recipe("dmd2", changes | {"placement.groups": groups})).on(1)
    adapter = one.trained // 2
    base = one.frozen - adapter
    assert split.frozen == 2 * base + adapter
    assert split.trained == one.trained
    assert split.rollout > base


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_is_read(path) -> None:
    recipe = load_recipe(path)
    assert recipe.run_dir.startswith(f"runs/{path.parent.name}/")


def test_there_are_recipes_for_stable_diffusion() -> None:
    assert {path.stem for path in SD35.glob("*.yaml")} == {
        "dmd2_4step_lora",
        "dmd2_4step_full",
        "dmd2_4step_adversarial",
    }


@pytest.mark.parametrize("path", sorted(SD35.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_network_of_a_recipe_is_the_published_one(path) -> None:
    """Stability AI's 2.5 billion: 2.243 in parameters, and 384 x 384 positions of width 1536."""
    network = empty(structure_of(load_recipe(path)))
    assert sum(p.numel() for p in network.parameters()) == 2_243_171_520
    assert [tuple(b.shape) for b in network.buffers()] == [(1, 384 * 384, 1536)]


@pytest.fixture(scope="module")
def lora() -> Estimator:
    """Of the recipe for one GPU."""
    return Estimator(load_recipe(SD35 / "dmd2_4step_lora.yaml"))


@pytest.fixture(scope="module")
def full() -> Estimator:
    """Of the recipe for eight GPUs."""
    return Estimator(load_recipe(SD35 / "dmd2_4step_full.yaml"))


def test_the_recipes_fit_where_they_say(lora, full) -> None:
    assert lora.on(1).total < 80 * GIGABYTE
    assert full.on(8).total < 80 * GIGABYTE < full.on(1).total
    # Weights of four roles and moments of two, in float32, without buffers and autoencoder.
    kept = full.on(1).kept - full.on(1).buffers - full.on(1).decoder
    assert kept == pytest.approx(8 * 4 * 2_243_171_520, rel=1e-5)


def test_images_of_validation_are_decoded_one_after_another(lora) -> None:
    memory = lora.on(1)
    assert memory.decoder == 4 * 83_819_683
    # At 1024 by 1024: 256 channels, and 128 of the convolution, twice, of 4 bytes.
    assert memory.images == 3 * 256 * 1024**2 * 4
    unseen = Estimator(lora.recipe.model_copy(update={"validation": None})).on(1)
    assert (unseen.decoder, unseen.images) == (0, 0)
    # They are made while nothing is kept for a backward pass.
    assert memory.needed == unseen.needed + memory.decoder
    few = replace(memory, activations=memory.images - 1)
    assert few.needed == replace(few, activations=0).needed


def test_every_rollout_worker_has_an_autoencoder(lora) -> None:
    changes = {"launch": {"kind": "ray"}, "rollout": {"workers": 3}}
    recipe = parse_recipe(lora.recipe.model_dump(mode="json") | changes)
    one, estimator = lora.on(1), Estimator(recipe)
    three, two_devices = estimator.on(1), estimator.on(2)
    assert (three.decoder, three.images) == (3 * one.decoder, 3 * one.images)
    assert two_devices.decoder == 2 * one.decoder


def test_a_whole_pipeline_is_its_own_by_default(lora, tmp_path) -> None:
    values = lora.recipe.model_dump(mode="json")
    values["model"]["pipeline"] = None
    assert Estimator(parse_recipe(values)).on(1) == lora.on(1)
    pipeline = write_tiny_pipeline(tmp_path / "pipeline")
    values["model"] = {"family": "sd3", "weights": str(pipeline)}
    sized = Estimator(parse_recipe(values)).on(1)
    assert sized.decoder > 0
    size = {k: v for k, v in TINY_SD3.items() if k != "out_channels"}
    values["model"]["network"] = size
    assert Estimator(parse_recipe(values)).on(1) == sized


@pytest.mark.parametrize("change", [{"norm_num_groups": 7}, {"up_block_types": ["What"] * 4}])
def test_an_autoencoder_that_cannot_be_is_named(lora, tmp_path, change) -> None:
    pipeline = write_tiny_pipeline(tmp_path / "pipeline")
    config = pipeline / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    values = lora.recipe.model_dump(mode="json")
    values["model"] = {"family": "sd3", "weights": str(pipeline)}
    with pytest.raises(UserError, match=r"model\.pipeline: its vae cannot decode a sample: "):
        Estimator(parse_recipe(values)).on(1)


def test_the_most_that_is_there_at_once_is_counted() -> None:
    x = torch.zeros(1000, device="meta")

    def call() -> Tensor:
        y = x + 1  # one
        y = (y * 2).exp()  # three, then the first two go
        return y + y.sum()  # two, and a number

    decoder = Decoder(nn.Identity(), call)
    assert image_bytes(decoder) == 3 * 4000


def shown(renderable) -> str:
    """As it is printed, 80 columns wide, without spaces at the ends of lines."""
    text = io.StringIO()
    Console(file=text, width=80).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")


@pytest.mark.parametrize(("name", "ranks"), [("lora", 1), ("full", 8)])
def test_the_tables_of_the_page_are_those_of_the_code(request, name, ranks) -> None:
    estimator = request.getfixturevalue(name)
    page = PAGE.read_text()
    assert shown(memory_tables.roles_table(estimator)) in page
    assert shown(memory_tables.ranks_table(estimator.recipe, {ranks: estimator.on(ranks)})) in page


def test_the_page_counts_passes_and_operations_right(lora) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    page, model = PAGE.read_text(), lora.model
    condition = {k: v.to("meta") for k, v in model.example_condition(1).items()}
    x = torch.zeros(1, *model.sample_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.forward(empty(model), x, torch.zeros(1, device="meta"), condition)
    flops = round(counter.get_total_flops() / 1e12, 2)
    assert f"One forward pass of one sample is {flops} TFLOP" in page
    method, train = lora.recipe.method, lora.recipe.train
    k, rollout = method.fake_updates_per_student, (method.steps - 1) / 2
    student, fake = rollout + 1 + 1 + 2 + 1 + 2, rollout + 1 + 1 + 1 + 2
    assert f"{student} + {k} * {fake}" in page
    cycle = student + k * fake
    seconds = (cycle - (k + 1)) * flops / 396
    assert f"{seconds:.2f} s a sample and cycle" in page
    assert f"{train.batch_size} samples: {train.batch_size * seconds:.0f} s a cycle" in page
    hours = train.batch_size * seconds * train.cycles / 3600
    assert f"{train.cycles} cycles: {hours:.0f} hours" in page


@pytest.fixture
def wide(make_recipe) -> Callable[..., Estimator]:
    """Of a recipe whose weights and activations both count."""
    network = {"sample_size": 32, "num_layers": 3, "num_attention_heads": 8}

    def make(changes: dict[str, Any] | None = None) -> Estimator:
        settings = {"model.network": network, "train.batch_size": 16, "parallel.kind": "fsdp2"}
        return Estimator(make_recipe("dmd2", settings | (changes or {})))

    return make


def test_what_does_not_fit_is_told_what_would(wide) -> None:
    changes = {"train.micro_batch_size": 1, "parallel.reduce_each_micro_batch": True}
    enough = wide(changes).on(2).total
    words = memory_tables.advice(wide(), Devices(2, enough))
    assert "Any one of these would make it fit:" in words
    written = "train.micro_batch_size=1 parallel.reduce_each_micro_batch=true"
    assert f"  {written}: " in words
    assert re.search(r"^  on (4|8) GPUs: ", words, re.MULTILINE)
    for remedy in remedies(wide(), Devices(2, enough)):
        assert remedy.memory.total <= enough


def test_more_devices_are_told_whatever_the_recipe_was_written_for(wide) -> None:
    estimator = wide({"launch.processes": 4})
    words = memory_tables.advice(estimator, Devices(2, estimator.on(4).total))
    assert re.search(r"^  on 4 GPUs: ", words, re.MULTILINE)


def test_networks_that_are_not_sharded_may_be_over_the_devices_there_are(wide) -> None:
    copies = wide({"parallel.kind": "none", "launch.processes": 4})
    words = memory_tables.advice(copies, Devices(4, wide().on(4).total))
    assert re.search(r"^  parallel.kind=fsdp2: ", words, re.MULTILINE)
    assert " GPUs: " not in words


def test_changes_that_help_only_together_are_told_together(wide) -> None:
    together = {
        "runtime.activation_checkpointing": True,
        "runtime.compute_dtype": "bfloat16",
        "train.micro_batch_size": 1,
        "parallel.reduce_each_micro_batch": True,
    }
    enough = wide(together).on(16).total
    (remedy,) = remedies(wide(), Devices(16, enough))
    assert remedy.memory.total == enough
    assert remedy.words.startswith("runtime.activation_checkpointing=true runtime.compute_dtype=")
    words = memory_tables.advice(wide(), Devices(16, enough))
    assert "This would make it fit:" in words


def test_what_nothing_helps_is_told_so(wide) -> None:
    words = memory_tables.advice(wide(), Devices(16, GIGABYTE))
    assert "LoRA and 64 GPUs together would not make it fit" in words


def test_a_network_that_looks_at_values_has_unknown_activations(make_recipe) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return self.layer(x) if bool(sigma.max() > 0.1) else x

    recipe = make_recipe("dmd2", {"model": {"family": "module"}, "method.guidance": 1.0})
    memory = Estimator(recipe, ModuleModel(Looking, (2,))).on(1)
    assert memory.activations is None
    assert memory.kept > 0
    assert "?" in shown(memory_tables.ranks_table(recipe, {1: memory}))


def test_training_refuses_before_it_reads_weights(make_recipe, monkeypatch) -> None:
    import fewstep
    from fewstep.launch import local

    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(local, "load_weights", read)
    monkeypatch.setattr(memory_tables, "memory_there_is", lambda device: 10_000)
    recipe = make_recipe("dmd2")
    with pytest.raises(UserError, match="memory: the run does not fit on its part") as error:
        fewstep.train(recipe)
    assert "Memory of a rank, MB" in str(error.value)
    assert not Path(recipe.run_dir).exists()


@pytest.mark.parametrize("there_is", [None, 10**9])
def test_training_goes_on_where_it_fits_or_nobody_knows(make_recipe, monkeypatch, there_is) -> None:
    monkeypatch.setattr(memory_tables, "memory_there_is", lambda device: there_is)
    recipe = make_recipe("dmd2")
    memory_tables.check_memory(recipe, recipe.model.build(), SINGLE)


def test_on_a_cuda_device_all_that_is_estimated_must_be_free(make_recipe, monkeypatch) -> None:
    recipe = make_recipe("dmd2")
    needed = Estimator(recipe).on(1).needed
    ranks = replace(SINGLE, device=torch.device("cuda:0"))
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        if fits:
            memory_tables.check_memory(recipe, recipe.model.build(), ranks)
        else:
            with pytest.raises(UserError, match="does not fit on cuda:0"):
                memory_tables.check_memory(recipe, recipe.model.build(), ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_main_memory_is_what_the_system_says() -> None:
    from fewstep.budget import memory_there_is

    (kibibytes,) = re.findall(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    found = memory_there_is(torch.device("cpu"))
    assert found == pytest.approx(int(kibibytes) * 1024, rel=0.01)
    assert memory_there_is(torch.device("mps")) is None
    assert os.sysconf("SC_PAGE_SIZE") > 0
