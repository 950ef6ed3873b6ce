import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig
from safetensors.torch import load_file
from sd3_pipeline import TINY_SD3, tiny_pipeline, write_tiny_pipeline
from torch import Tensor

from fewstep.config import dump_recipe, parse_recipe
from fewstep.errors import UserError
from fewstep.models.block_features import FeatureExtractor, feature_widths, select_blocks
from fewstep.models.model import Denoiser
from fewstep.models.sd3 import SD3, SD3Settings
from fewstep.models.sd3_files import shift_of
from fewstep.models.sd3_network import SD3Network
from fewstep.parallel.compute import recompute_in_backward
from fewstep.parallel.ranks import CPU
from fewstep.pretrained import load_weights, resolve_model, resolve_recipe
from fewstep.roles.storage import SharedBase

SIZE = SD3Network(**{k: v for k, v in TINY_SD3.items() if k != "out_channels"})
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("sd3") / "pipeline")


@pytest.fixture
def copied(pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline, tmp_path / "copy"))


def settings(directory: Path, **changes: Any) -> SD3Settings:
    return SD3Settings(weights=str(directory), **changes).with_network_of(directory)


def adapter(directory: Path, **changes: Any) -> SD3:
    built = settings(directory, **changes).build()
    assert isinstance(built, SD3)
    return built


def inputs(model: SD3, count: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, *model.sample_shape, generator=generator)
    return x, torch.linspace(0.2, 1, count), model.example_condition(count)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_forward_is_the_call_that_the_stock_pipeline_makes(pipeline: Path) -> None:
    model = adapter(pipeline, max_sequence_length=16)
    seen: dict[str, Any] = {}
    stock = tiny_pipeline()
    stock.set_progress_bar_config(disable=True)
    call = stock.transformer.forward

    def spy(**arguments: Any) -> Any:
        seen.update(arguments, output=call(**arguments)[0])
        return (seen["output"],)

    stock.transformer.forward = spy
    stock("the red cat", num_inference_steps=1, guidance_scale=1.0, max_sequence_length=16)
    network = model.load_network(pipeline)
    condition = {
        "prompt_embeds": seen["encoder_hidden_states"],
        "pooled": seen["pooled_projections"],
    }
    with torch.no_grad():
        output = model.forward(network, seen["hidden_states"], seen["timestep"] / 1000, condition)
    assert torch.equal(output, seen["output"])
    expected = {k: v.shape[1:] for k, v in condition.items()}
    assert {k: v.shape[1:] for k, v in model.example_condition(1).items()} == expected


def test_size_resolution_and_pipeline_are_those_of_the_weights(pipeline: Path) -> None:
    found = settings(pipeline)
    assert (found.network, found.pipeline) == (SIZE, str(pipeline))
    assert adapter(pipeline).sample_shape == (4, 8, 8)
    assert adapter(pipeline, resolution=96).sample_shape == (4, 12, 12)
    bare = settings(pipeline / "transformer")
    assert (bare.network, bare.pipeline) == (SIZE, None)
    assert settings(pipeline / "transformer", pipeline=str(pipeline)).build().sample_shape[1] == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resolution": 100}, r"model\.resolution \(100\) must be a multiple of 8"),
        ({"resolution": 72}, r"resolution / 8 \(9\) must be a multiple of patch_size \(2\)"),
        ({"resolution": 112}, r"\(14\) is more than pos_embed_max_size times patch_size \(12\)"),
        ({"network": SD3Network()}, r"model\.network differs from .*config\.json"),
    ],
)
def test_what_does_not_fit_the_network_is_refused(
    pipeline: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        settings(pipeline, **changes)


def test_new_networks_are_on_pixels() -> None:
    model = SD3Settings(network=SIZE, resolution=12).build()
    assert model.sample_shape == (4, 12, 12)
    images = torch.randn(2, 4, 12, 12)
    assert model.decode(model.encode(images)) is images
    assert model.autoencoder(torch.device("cpu"), torch.float32) is None
    with pytest.raises(UserError, match=r"give model\.text_encoder"):
        model.prompt_encoder(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="resolution"):
        SD3Settings(network=SIZE, resolution=13)
    with pytest.raises(ValueError, match="give 'weights'"):
        SD3Settings()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"caption_projection_dim": 8}, "caption_projection_dim"),
        ({"dual_attention_layers": [3]}, "there is no block 3 of 3"),
        ({"sample_size": 9}, "multiple of patch_size"),
        ({"num_layers": "two"}, "num_layers"),
        ({"out_channels": 8}, "'out_channels': 8.* not supported"),
        ({"_class_name": "DiTTransformer2DModel"}, "DiTTransformer2DModel, where a SD3"),
    ],
)
def test_an_impossible_network_names_the_file(
    copied: Path, changes: dict[str, Any], words: str
) -> None:
    edit(copied / "transformer" / "config.json", **changes)
    with pytest.raises(UserError, match=rf"transformer/config\.json.*{words}"):
        settings(copied)


def test_a_pipeline_of_other_parts_is_refused(copied: Path) -> None:
    edit(copied / "vae" / "config.json", latent_channels=16)
    with pytest.raises(UserError, match="latents of 16 channels, the network takes 4"):
        settings(copied)
    edit(copied / "vae" / "config.json", latent_channels=4, block_out_channels=[8, 8])
    with pytest.raises(UserError, match="latent of 2 by 2 pixels"):
        settings(copied)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"_class_name": "DDIMScheduler", "prediction_type": "epsilon"},
        {"prediction_type": "v_prediction"},
    ],
)
def test_a_teacher_that_predicts_something_else_is_refused(
    copied: Path, scheduler: dict[str, Any]
) -> None:
    edit(copied / "scheduler" / "scheduler_config.json", **scheduler)
    with pytest.raises(UserError, match=r"scheduler is a .* does not predict velocity"):
        settings(copied)


def test_the_teachers_shift_is_that_of_its_scheduler(pipeline: Path, copied: Path) -> None:
    assert adapter(pipeline).schedule_shift() == 3.0
    edit(copied / "scheduler" / "scheduler_config.json", use_dynamic_shifting=True)
    small, large = (adapter(copied).schedule_shift(r) for r in (64, 1024))
    assert small is not None
    assert large == pytest.approx(torch.e**1.15, rel=1e-6)
    # A line through (256, 0.5) and (4096, 1.15), at 16 tokens.
    assert small == pytest.approx(torch.e ** (0.5 - 240 * 0.65 / 3840), rel=1e-9)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_a_dynamic_shift_gives_the_schedulers_own_sigmas(kind: str) -> None:
    config = {"use_dynamic_shifting": True, "time_shift_type": kind}
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(sigmas=[1.0, 0.6, 0.2], mu=0.5 + 0.65 * (1024 - 256) / 3840)
    s, t = shift_of(config, 1024), torch.tensor([1.0, 0.6, 0.2])
    torch.testing.assert_close(scheduler.sigmas[:3], s * t / (1 + (s - 1) * t))


def test_nothing_stands_for_no_prompt_before_it_is_told(pipeline: Path) -> None:
    model = adapter(pipeline)
    condition = model.example_condition(3)
    with pytest.raises(UserError, match="encoding of the empty prompt"):
        model.unconditional(condition)
    empty = {key: value[0] + 1 for key, value in condition.items()}
    model.take_unconditional(empty)
    none = model.unconditional({key: value.double() for key, value in condition.items()})
    assert {key: value.shape for key, value in none.items()} == {
        key: value.shape for key, value in condition.items()
    }
    for key, value in none.items():
        assert value.dtype == torch.float64
        assert all(torch.equal(row, empty[key].double()) for row in value)


def test_a_guided_prediction_is_that_of_the_formula(pipeline: Path) -> None:
    model = adapter(pipeline, max_sequence_length=4)
    network = model.load_network(pipeline)
    x, sigma, condition = inputs(model)
    none = {key: torch.zeros_like(value) for key, value in condition.items()}
    model.take_unconditional({key: value[0] for key, value in none.items()})
    with torch.no_grad():
        guided = Denoiser(model, network, lambda: None).guided(x, sigma, condition, 4.0).output
        c, u = (model.forward(network, x, sigma, each) for each in (condition, none))
    torch.testing.assert_close(guided, u + 4 * (c - u))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharded", [False, True])
def test_weights_of_any_precision_and_number_of_files_are_read(
    tmp_path: Path, stored: torch.dtype, sharded: bool
) -> None:
    torch.manual_seed(0)
    network = SD3Transformer2DModel(**TINY_SD3).to(stored)
    network.save_pretrained(tmp_path / "net", max_shard_size="60KB" if sharded else "1GB")
    files = sorted((tmp_path / "net").glob("*.safetensors"))
    assert (len(files) > 1) == sharded
    shutil.copy(files[0], tmp_path / "net" / "another.safetensors")
    model = adapter(tmp_path / "net", max_sequence_length=4)
    opened = model.open_network(tmp_path / "net")
    assert all(p.is_meta for p in opened.network.parameters())
    loaded = model.load_network(tmp_path / "net")
    for key, value in network.state_dict().items():
        assert torch.equal(opened.weights[key], value), key
        assert loaded.state_dict()[key].dtype == torch.float32
        assert torch.equal(loaded.state_dict()[key], value.float()), key
    if sharded:
        files[0].unlink()
        with pytest.raises(UserError, match=f"not there: .*{re.escape(files[0].name)}"):
            model.open_network(tmp_path / "net")


def test_weights_of_another_size_are_refused(pipeline: Path, copied: Path) -> None:
    model = adapter(pipeline)
    other = SD3Transformer2DModel(**{**TINY_SD3, "pooled_projection_dim": 8})
    other.save_pretrained(copied / "transformer")
    with pytest.raises(UserError, match="do not fit"):
        model.load_network(copied)
    other = SD3Transformer2DModel(**{**TINY_SD3, "num_layers": 2})
    other.save_pretrained(copied / "transformer")
    with pytest.raises(UserError, match="missing"):
        model.load_network(copied)


def test_what_is_saved_is_read_by_diffusers(pipeline: Path, tmp_path: Path) -> None:
    model = adapter(pipeline)
    network = model.load_network(pipeline)
    model.save_network(network, tmp_path / "saved")
    plain = SD3Transformer2DModel.from_pretrained(tmp_path / "saved")
    for key, value in load_file(pipeline / "transformer" / WEIGHTS).items():
        assert torch.equal(plain.state_dict()[key], value)


def shared(model: SD3) -> SharedBase:
    torch.manual_seed(0)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=list(model.lora_targets))
    storage = SharedBase(model.build_network(), ("student", "fake_score"), lora)
    for role in storage.adapters:
        for parameter in storage.parameters(role).values():
            torch.nn.init.normal_(parameter, std=0.3)
    return storage


def test_lora_is_on_all_of_the_attention() -> None:
    model = SD3Settings(network=SIZE, max_sequence_length=4).build()
    assert isinstance(model, SD3)
    storage = shared(model)
    adapted = {key.split(".lora_")[0] for key in storage.parameters("student")}
    linear = {
        name
        for name, module in model.build_network().named_modules()
        if isinstance(module, torch.nn.Linear) and ".attn" in name
    }
    assert adapted == linear
    assert any(".attn2." in name for name in adapted)


def test_one_call_for_several_roles_gives_what_their_own_calls_give() -> None:
    model = SD3Settings(network=SIZE, max_sequence_length=4).build()
    assert isinstance(model, SD3)
    storage = shared(model)
    x, sigma, condition = inputs(model)
    roles = ("fake_score", "teacher_score", "student")
    network = storage.networks["base"]
    each = []
    with torch.no_grad():
        for role in roles:
            storage.activate(role)
            each.append(model.forward(network, x, sigma, condition))
        storage.activate_each(roles, len(x))
        tripled = {key: torch.cat([value] * 3) for key, value in condition.items()}
        together = model.forward(network, torch.cat([x] * 3), torch.cat([sigma] * 3), tripled)
    torch.testing.assert_close(together, torch.cat(each))
    assert not torch.allclose(each[0], each[1], atol=1e-3)


def test_blocks_may_be_recomputed() -> None:
    model = SD3Settings(network=SIZE, max_sequence_length=4).build()
    assert isinstance(model, SD3)
    torch.manual_seed(0)
    network = model.build_network()
    blocks = model.blocks(network)
    assert list(blocks) == [f"transformer_blocks.{i}" for i in range(3)]
    x, sigma, condition = inputs(model)
    gradients = []
    for _ in range(2):
        network.zero_grad()
        model.forward(network, x, sigma, condition).square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in network.named_parameters()})
        recompute_in_backward(blocks.values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-8)


# Recipes.


def recipe(tmp_path: Path, model: dict[str, Any], method: dict[str, Any] | None = None) -> Any:
    return parse_recipe(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"family": "sd3", **model},
            "method": {"name": "dmd2", "steps": 2, **(method or {})},
            "optimizers": {"student": {"lr": 1e-3}, "fake_score": {"lr": 1e-3}},
            "train": {"cycles": 1, "batch_size": 2},
        }
    )


def fine_tuning(weights: Path, run_dir: Path, sampling: dict[str, Any]) -> Any:
    """A recipe that trains a pipeline's network on images."""
    return parse_recipe(
        {
            "run_dir": str(run_dir),
            "model": {"family": "sd3", "weights": str(weights)},
            "data": {"name": "images", "files": ["images"], "encoded": "encoded"},
            "method": {"name": "flow_matching", "sampling": sampling},
            "optimizers": {"student": {"lr": 1e-3}},
            "train": {"cycles": 1, "batch_size": 2},
        }
    )


def test_a_recipe_is_resolved_and_its_weights_are_opened(pipeline: Path, tmp_path: Path) -> None:
    resolved = resolve_recipe(recipe(tmp_path, {"weights": str(pipeline), "resolution": 96}))
    assert resolved.model.network == SIZE
    assert resolved.model.resolution == 96
    assert parse_recipe(json.loads(resolved.model_dump_json())) == resolved
    assert resolve_recipe(resolved) == resolved
    opened = load_weights(resolved, resolved.model.build())
    assert opened.weights["proj_out.weight"].shape == (16, 16)
    # It is gone on with without the weights being looked at.
    gone = recipe(tmp_path, {"weights": str(pipeline / "gone"), "resolution": 96})
    kept = resolved.model_copy(
        update={"model": resolved.model.model_copy(update={"weights": str(pipeline / "gone")})}
    )
    assert resolve_recipe(gone, resumed=kept).model == kept.model


def test_a_network_of_another_family_is_refused(pipeline: Path, tmp_path: Path) -> None:
    dit = {"family": "dit", "weights": str(pipeline / "transformer")}
    with pytest.raises(UserError, match="SD3Transformer2DModel, where a DiTTransformer2DModel"):
        resolve_recipe(recipe(tmp_path, dit))
    resumed = recipe(tmp_path, {"family": "dit", "weights": "x", "network": {}})
    given = recipe(tmp_path, {"weights": "x"})
    with pytest.raises(UserError, match=r"model\.family is 'sd3', but .* trained with 'dit'"):
        resolve_recipe(given, resumed=resumed)


def test_a_name_on_the_hub_is_downloaded(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(pipeline)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolved = resolve_recipe(recipe(tmp_path, {"weights": "owner/sd-3.5"}))
    assert (resolved.model.network, resolved.model.pipeline) == (SIZE, "owner/sd-3.5")
    assert load_weights(resolved, resolved.model.build()).weights
    assert resolved.model.build().schedule_shift() == 3.0
    assert {name for name, _ in asked} == {"owner/sd-3.5"}
    assert "text_encoder_3/*" in asked[0][1]["allow_patterns"]
    assert {options["revision"] for _, options in asked} == {None}
    asked.clear()
    resolved = resolve_recipe(recipe(tmp_path, {"weights": "owner/sd-3.5@refs/pr/7"}))
    assert resolved.model.pipeline == "owner/sd-3.5@refs/pr/7"
    assert {(name, o["revision"]) for name, o in asked} == {("owner/sd-3.5", "refs/pr/7")}


@pytest.mark.parametrize(
    ("method", "grid"),
    [
        ({}, (1.0, 0.75)),
        ({"shift": 1.0}, (1.0, 0.5)),
        ({"sigmas": [0.9, 0.4]}, (0.9, 0.4)),
        ({"sigmas": None}, (1.0, 0.75)),
    ],
)
def test_a_shift_that_is_not_given_is_that_of_the_teachers_schedule(
    copied: Path, tmp_path: Path, method: dict[str, Any], grid: tuple[float, ...]
) -> None:
    given = recipe(tmp_path, {"weights": str(copied)}, method)
    resolved = resolve_recipe(given)
    assert resolved.method.build().sampler().sigmas == grid
    assert resolve_recipe(resolved) == resolved
    # It is gone on with without the pipeline.
    shutil.move(copied / "scheduler", copied / "gone")
    assert resolve_recipe(given, resolved) == resolved


@pytest.mark.parametrize(
    "scheduler",
    [
        *({"shift": wrong} for wrong in (None, "abc", 0, -1, float("inf"))),
        {"use_dynamic_shifting": True, "base_shift": None},
        {"use_dynamic_shifting": True, "max_image_seq_len": 256},
    ],
)
def test_a_schedule_without_a_usable_shift_is_named_where_it_is_needed(
    copied: Path, tmp_path: Path, scheduler: dict[str, Any]
) -> None:
    file = copied / "scheduler" / "scheduler_config.json"
    edit(file, **scheduler)
    given = {"weights": str(copied)}
    with pytest.raises(UserError, match=f"^{file} says no shift above 0 for .* give method.shift"):
        resolve_recipe(recipe(tmp_path, given))
    resolve_model(recipe(tmp_path, given))  # as for a plan
    for method in ({"shift": 2.0}, {"sigmas": [1.0, 0.5]}):
        resolve_recipe(recipe(tmp_path, given, method))


def test_weights_of_a_run_bring_its_grid_and_so_does_its_export(
    copied: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    trained = resolve_recipe(fine_tuning(copied, teacher, {"steps": 4, "shift": 5.0}))
    (teacher / "recipe.yaml").write_text(dump_recipe(trained))
    edit(copied / "model_index.json", sigmas=list(trained.method.build().sampler().sigmas))
    edit(copied / "scheduler" / "scheduler_config.json", shift=1.0)
    for weights in (copied, teacher):
        resolved = resolve_recipe(recipe(tmp_path, {"weights": str(weights)}))
        assert resolved.method.shift == 5.0
        assert resolved.method.sigmas == pytest.approx((1.0, 5 / 6), rel=1e-12)
    edit(copied / "model_index.json", sigmas=[0.9, 0.3])
    with pytest.raises(UserError, match="which no shift makes; give it in the recipe"):
        resolve_recipe(recipe(tmp_path, {"weights": str(copied)}))
    # The pipeline is not needed for a run of its own weights.
    shutil.rmtree(copied)
    assert resolve_recipe(recipe(tmp_path, {"weights": str(teacher)})).method.shift == 5.0


def test_a_teacher_is_sampled_by_its_own_schedule_unless_it_is_told_another(copied: Path) -> None:
    edit(copied / "scheduler" / "scheduler_config.json", use_dynamic_shifting=True)
    own = adapter(copied).schedule_shift()
    for sampling, shift in (({"steps": 8}, own), ({"shift": 2.0}, 2.0)):
        resolved = resolve_recipe(fine_tuning(copied, Path("run"), sampling))
        assert resolved.method.sampling.shift == shift


def test_a_hub_out_of_reach_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"model\.weights: owner/name .* could not be reached"):
        resolve_recipe(recipe(tmp_path, {"weights": "owner/name"}))


def test_a_directory_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"^model.weights: {nowhere} is not a directory"):
        resolve_recipe(recipe(tmp_path, {"weights": nowhere}))
    model = SD3Settings(network=SIZE, pipeline=nowhere).build()
    for use in (
        lambda: model.prompt_encoder(CPU, torch.float32),
        lambda: model.autoencoder(CPU, torch.float32),
        model.schedule_shift,
    ):
        with pytest.raises(UserError, match=f"^model.pipeline: {nowhere} is not a directory"):
            use()
    assert model.encoding().files == {}  # a run goes on without what it has read already


def test_features_are_the_image_tokens_of_a_block(pipeline: Path) -> None:
    model = adapter(pipeline)
    network = model.load_network(pipeline)
    x, sigma, condition = inputs(model)
    names = ["transformer_blocks.1", "transformer_blocks.2"]
    seen: list[Tensor] = []
    last = network.transformer_blocks[-1]
    hook = last.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    blocks = select_blocks(model, network, names)
    with torch.no_grad():
        denoiser = Denoiser(model, network, lambda: None)
        found = FeatureExtractor(denoiser, blocks)(x, sigma, condition)
    hook.remove()
    assert feature_widths(model, network, names) == [16, 16]
    assert [f.shape for f in found] == [(2, 16, 16)] * 2  # 16 tokens of an image of 8 by 8
    assert torch.equal(found[1], seen[0])
