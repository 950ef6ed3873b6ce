"""An exported text-to-image student samples the same in plain diffusers as here."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from sd3_pipeline import TINY_SD3, tiny_pipeline, write_tiny_pipeline
from torch import Tensor

import fewstep
from fewstep.build import build_worker
from fewstep.data.items import Items
from fewstep.errors import UserError
from fewstep.export import export_run
from fewstep.export_check import by_diffusers, compared, conditions_to_check, sampled
from fewstep.export_kohya import kohya_tensors
from fewstep.methods.method import SamplerSpec
from fewstep.models.hub import NOT_NEEDED
from fewstep.models.model import Model
from fewstep.pipeline_engine import PipelineEngine
from fewstep.pretrained import load_weights, resolve_recipe
from fewstep.rollout import StudentEngine
from fewstep.run import open_run
from fewstep.sampling import rollout_of_samples
from fewstep.source import open_source

PROMPTS = ("a red cat", "the house", "a cat on the red house")
LORA_FILE = "pytorch_lora_weights.safetensors"
LENGTH = 8
# linspace(1, 0, 4)[:-1] shifted by 3, times 1000
TIMESTEPS = [1000.0, 1000 * 3 * (2 / 3) / (1 + 2 * 2 / 3), 600.0]


class Texts(Items):
    """Prompts, encoded in memory; the empty one stands for none."""

    has_samples = False

    def __init__(self, encoded: Mapping[str, Tensor], prompts: Sequence[str]) -> None:
        self.prompts = prompts
        self._encoded = {key: value[:-1] for key, value in encoded.items()}
        self.unconditional = {key: value[-1] for key, value in encoded.items()}

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(self.prompts).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.prompts)

    def condition(self, items: Tensor) -> dict[str, Tensor]:
        return {key: value[items] for key, value in self._encoded.items()}

    def x0(self, items: Tensor) -> Tensor:
        raise ValueError("there are none")


def recipe(directory: Path, model: dict[str, Any], **changes: Any) -> fewstep.Recipe:
    storage = changes.pop("storage", "independent")
    values = {
        "run_dir": str(directory),
        "model": {"family": "sd3", "max_sequence_length": LENGTH, **model},
        "method": {
            "name": "dmd2",
            "steps": 3,
            "shift": 3.0,
            "fake_updates_per_student": 1,
            "guidance": 2.0,
            "transition": changes.pop("transition", "euler"),
        },
        "data": {"name": "custom"},
        "storage": storage,
        "optimizers": {"student": {"lr": 1e-2}, "fake_score": {"lr": 1e-2}},
        "train": {"cycles": 1, "batch_size": 2},
        "logging": {"teacher_samples": 2, "tensorboard": False},
        **changes,
    }
    if storage == "shared_base":
        # Rank and alpha differ, so that a lost alpha shows.
        values["lora"] = {"rank": 2, "alpha": 8.0}
    return fewstep.parse_recipe(values)


def texts(model: Model) -> Texts:
    encoder = model.prompt_encoder(torch.device("cpu"), torch.float32)
    return Texts(encoder.encode([*PROMPTS, ""]), PROMPTS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("sd3") / "teacher")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> dict[str, fewstep.Run]:
    """A network of its own by Euler steps; an adapter by fresh noise, at another resolution."""
    made = {}
    for name, changes, model in (
        ("whole", {}, {}),
        ("adapter", {"storage": "shared_base", "transition": "renoise"}, {"resolution": 48}),
    ):
        directory = tmp_path_factory.mktemp(name) / "run"
        wanted = recipe(directory, {"weights": str(teacher), **model}, **changes)
        items = texts(resolve_recipe(wanted).model.build())
        made[name] = fewstep.train(wanted, data=items)
    return made


@pytest.fixture(scope="module")
def exports(
    runs: dict[str, fewstep.Run], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("exports")
    return {name: export_run(run, directory / name) for name, run in runs.items()}


def load(directory: Path) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(
        directory, custom_pipeline=str(directory), trust_remote_code=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def spy(pipeline: Any) -> list[float]:
    seen: list[float] = []
    forward = pipeline.transformer.forward

    def call(*arguments: Any, **options: Any) -> Any:
        assert len(options["timestep"]) == len(options["hidden_states"])
        seen.append(float(options["timestep"][0]))
        return forward(*arguments, **options)

    pipeline.transformer.forward = call
    return seen


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_called_by_default_it_gives_our_images_on_exactly_the_trained_grid(
    runs: dict[str, fewstep.Run], exports: dict[str, Path], name: str
) -> None:
    run, pipeline = runs[name], load(exports[name])
    seen = spy(pipeline)
    images = pipeline(
        list(PROMPTS), generator=torch.Generator().manual_seed(0), output_type="pt"
    ).images
    assert seen == pytest.approx(TIMESTEPS, abs=1e-3)
    condition = texts(run.roles.model).condition(torch.arange(3))
    latents, ours = sampled(run.roles, run.result_role, run.method.sampler(), condition)
    side = {"whole": 64, "adapter": 48}[name]
    assert images.shape == ours.shape == (3, 3, side, side)
    torch.testing.assert_close(images, ours, rtol=0, atol=1e-4)
    assert latents.std() > 0.1
    assert "step" not in vars(pipeline.scheduler)
    with pytest.raises(ValueError, match="trained for 3 steps"):
        pipeline(list(PROMPTS), num_inference_steps=28)
    seen.clear()
    pipeline(PROMPTS[0], sigmas=None)  # the stock class's own default
    assert seen == pytest.approx(TIMESTEPS, abs=1e-3)


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_the_readme_runs_as_written_also_with_the_stock_class(
    runs: dict[str, fewstep.Run], exports: dict[str, Path], tmp_path: Path, name: str
) -> None:
    text = (exports[name] / "README.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    directory = f"directory = {str(exports[name])!r}"
    exec(compile(first.replace('directory = "."', directory), "README", "exec"), names)
    prompt = "a red cat on a roof"
    torch.manual_seed(7)
    expected = names["pipeline"](prompt, output_type="pt").images
    second = second.replace("image = pipeline(", "torch.manual_seed(7)\nimage = pipeline(")
    second = second.replace(".images[0]", ".images").replace(
        "guidance_scale=1.0", 'guidance_scale=1.0, output_type="pt"'
    )
    names |= {"torch": torch, "directory": Path(shutil.copytree(exports[name], tmp_path / "copy"))}
    (names["directory"] / "pipeline.py").unlink()
    exec(compile(second, "README", "exec"), names)
    assert type(names["pipeline"]) is StableDiffusion3Pipeline
    torch.testing.assert_close(names["image"], expected, rtol=0, atol=1e-6)
    assert ("global generator" in text) == (name == "adapter")
    assert ("kohya_lora_weights.safetensors" in text) == (name == "adapter")
    assert runs[name].recipe.model.weights in text


@pytest.mark.parametrize("kind", [DiffusionPipeline, StableDiffusion3Pipeline])
def test_no_class_of_diffusers_gets_it_with_other_defaults(
    exports: dict[str, Path], kind: Any
) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        kind.from_pretrained(exports["whole"])
    pipeline = kind.from_pretrained(exports["whole"], trust_remote_code=True)
    assert isinstance(pipeline, StableDiffusion3Pipeline)
    assert pipeline.config.sigmas == pytest.approx([t / 1000 for t in TIMESTEPS])


def test_the_export_is_whole_and_the_rest_is_the_teachers(
    exports: dict[str, Path], teacher: Path
) -> None:
    parts = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_3")
    for part in parts:
        for file in (teacher / part).iterdir():
            copy = exports["whole"] / part / file.name
            assert copy.read_bytes() == file.read_bytes()
            assert not copy.is_symlink()
    trained = load_file(exports["whole"] / "transformer" / "diffusion_pytorch_model.safetensors")
    before = load_file(teacher / "transformer" / "diffusion_pytorch_model.safetensors")
    assert trained.keys() == before.keys()
    assert not torch.equal(trained["proj_out.weight"], before["proj_out.weight"])


def test_an_export_is_sampled_as_its_run_wherever_it_is_moved(
    runs: dict[str, fewstep.Run], exports: dict[str, Path], tmp_path: Path
) -> None:
    run = runs["adapter"]
    moved = Path(shutil.copytree(exports["adapter"], tmp_path / "moved"))
    source = open_source(moved)
    theirs = source.sample(source.encode(list(PROMPTS)), source.sampler(None), 5)
    ours = run.sample(3, seed=5)
    assert theirs.network_calls == 3
    assert ours.images.shape == (3, 3, 48, 48)
    torch.testing.assert_close(theirs.images, ours.images, rtol=0, atol=1e-4)
    assert str(moved) == source.roles.model.settings.pipeline  # type: ignore[attr-defined]


def test_a_wrong_grid_is_noticed_by_the_check(
    runs: dict[str, fewstep.Run], exports: dict[str, Path]
) -> None:
    run, condition = runs["whole"], conditions_to_check(runs["whole"])
    assert condition["prompt_embeds"].shape == (3, 77 + LENGTH, 32)
    theirs = by_diffusers(run.roles, exports["whole"], condition)
    right, wrong = run.method.sampler(), SamplerSpec((1.0, 0.7, 0.4), "euler")
    assert compared(sampled(run.roles, "student", right, condition), theirs) < 1e-4
    assert compared(sampled(run.roles, "student", wrong, condition), theirs) > 1e-3


def test_a_damaged_export_is_not_published(
    runs: dict[str, fewstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fewstep.pipeline.FlowMatchEulerDiscreteScheduler", shifted)
    with pytest.raises(UserError, match="differ from ours"):
        export_run(runs["whole"], tmp_path / "export")
    assert list(tmp_path.iterdir()) == []
    export_run(runs["whole"], tmp_path / "export", verify=False)


def shifted(shift: float, **options: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0, **options)


def test_weights_in_half_precision_besides_are_neither_fetched_nor_taken_over(
    runs: dict[str, fewstep.Run], teacher: Path, tmp_path: Path
) -> None:
    names = [
        "model.fp16.safetensors",
        "model.fp16-00001-of-00002.safetensors",
        "model.safetensors.index.fp16.json",
    ]
    for name in names:
        (teacher / "text_encoder" / name).touch()
    directory = export_run(runs["whole"], tmp_path / "export", verify=False) / "text_encoder"
    for name in names:
        (teacher / "text_encoder" / name).unlink()
        assert any(fnmatch(f"text_encoder/{name}", pattern) for pattern in NOT_NEEDED)
    assert {file.name for file in directory.iterdir()} == {"config.json", "model.safetensors"}


def test_others_may_read_an_export_as_any_file(exports: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    usual = (tmp_path / "any").stat().st_mode
    files = [file for file in exports["adapter"].rglob("*") if file.is_file()]
    ours = [file for file in files if file.parent.name in ("adapter", "transformer", "lora")]
    assert {file.suffix for file in ours} == {".safetensors", ".json", ".py", ".md"}
    assert {file.stat().st_mode for file in ours} == {usual}


# The adapter.


def by_readme(directory: Path) -> tuple[Any, Tensor]:
    """The pipeline and the images that the README of an adapter makes, from noise of seed 3."""
    text = (directory / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    names: dict[str, Any] = {"torch": torch}
    code = code.replace('load_lora_weights(".")', f"load_lora_weights({str(directory)!r})")
    code = code.replace("guidance_scale=1.0", 'guidance_scale=1.0, output_type="pt"')
    code = code.replace("image = pipeline(", "torch.manual_seed(3)\nimage = pipeline(")
    exec(compile(code.replace(".images[0]", ".images"), "README", "exec"), names)
    return names["pipeline"], names["image"]


def assert_merged(run: fewstep.Run, images: Tensor, directory: Path) -> None:
    """See that images are those of the pipeline that has the adapter merged."""
    merged = load(export_run(run, directory, verify=False))
    torch.manual_seed(3)
    expected = merged("a red cat on a roof", output_type="pt").images
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("base", ["run", "network", "network in a pipeline"])
def test_an_adapter_is_put_on_the_network_that_it_was_trained_on(
    runs: dict[str, fewstep.Run],
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, weights = runs["whole"], Path("other")  # the README's place is another directory
    if base == "run":
        weights = whole.directory
    else:  # the same, as another program would have written it
        export_run(whole, weights, form="network", verify=False)
        weights = weights / "transformer" if base == "network" else weights
    model = {"weights": str(weights), "pipeline": str(teacher)}
    wanted = recipe(tmp_path / "run", model, storage="shared_base")
    run = fewstep.train(wanted, data=texts(resolve_recipe(wanted).model.build()))
    export_run(run, tmp_path / "lora", form="lora")
    assert (tmp_path / "lora" / "base").is_dir() == (base == "run")
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path / "lora")
        images = by_readme(tmp_path / "lora")[1]
    assert_merged(run, images, tmp_path / "merged")
    text = (tmp_path / "merged" / "README.md").read_text()
    place = "(`--format lora` adds it)" if base == "run" else f"`{weights}`"
    assert re.search(rf"on the network that its run\nbegan with,? {re.escape(place)}", text)


def test_the_adapter_loads_into_the_stock_pipeline_with_every_key(
    runs: dict[str, fewstep.Run], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = runs["adapter"]
    directory = export_run(run, tmp_path / "lora", form="lora")
    assert sorted(p.name for p in directory.iterdir()) == [
        "README.md", "fewstep.json", "kohya_lora_weights.safetensors", LORA_FILE,
    ]  # fmt: skip
    pipeline, images = by_readme(directory)
    written = load_file(directory / LORA_FILE)
    taken = get_peft_model_state_dict(pipeline.transformer, adapter_name="default_0")
    assert {f"transformer.{key}" for key in taken} == written.keys()
    told = capfd.readouterr().err.lower()
    assert "missing" not in told
    assert "unexpected" not in told
    assert_merged(run, images, tmp_path / "merged")
    before = tiny_pipeline().transformer.state_dict()
    for key, value in pipeline.transformer.state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace(".base_layer.", ".")])


def test_a_readme_names_a_repository_and_its_revision_as_diffusers_wants_them(
    runs: dict[str, fewstep.Run], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(teacher))
    run = runs["adapter"]
    for name, arguments in (
        ("owner/sd-3.5@abc1", '"owner/sd-3.5", revision="abc1")'),
        ("owner/sd-3.5", '"owner/sd-3.5")'),
    ):
        model = run.recipe.model.model_copy(update={"weights": name, "pipeline": name})
        adapter = model.build()
        adapter.take_unconditional(run.items.unconditional)
        moved = replace(run, recipe=run.recipe.model_copy(update={"model": model}))
        monkeypatch.setattr(run.roles, "model", adapter)
        directory = export_run(moved, tmp_path / "lora", form="lora", verify=False)
        text = (directory / "README.md").read_text()
        assert f"StableDiffusion3Pipeline.from_pretrained({arguments}" in text


def test_weights_that_cannot_be_reached_any_more_are_no_reason_to_lose_an_export(
    runs: dict[str, fewstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    run = runs["adapter"]
    for weights, base in (("owner/tuned", '"owner/tuned"'), (str(tmp_path / "gone"), '"base"')):
        model = run.recipe.model.model_copy(update={"weights": weights})
        moved = replace(run, recipe=run.recipe.model_copy(update={"model": model}))
        directory = export_run(moved, tmp_path / "lora", form="lora", verify=False)
        text = (directory / "README.md").read_text()
        assert f"network = SD3Transformer2DModel.from_pretrained({base})" in text


def test_programs_that_know_no_alpha_apply_the_adapter_at_its_strength(
    runs: dict[str, fewstep.Run], exports: dict[str, Path], teacher: Path
) -> None:
    file = exports["adapter"] / "lora" / LORA_FILE
    written = load_file(file)
    before = load_file(teacher / "transformer" / "diffusion_pytorch_model.safetensors")
    merged = load_file(exports["adapter"] / "transformer" / "diffusion_pytorch_model.safetensors")
    modules = {key.removeprefix("transformer.").split(".lora_")[0] for key in written}
    for name in modules:
        # The names that ComfyUI maps for this family.
        assert re.fullmatch(
            r"transformer_blocks\.\d+\.(attn2?\.to_(q|k|v|out\.0)|attn\.(add_[qkv]_proj|to_add_out))",
            name,
        )
        down, up = (written[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(
            merged[f"{name}.weight"], before[f"{name}.weight"] + up @ down, rtol=1e-4, atol=1e-6
        )
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert told["transformer.lora_alpha"] == told["transformer.r"] == 2


def test_an_adapter_that_kohyas_file_tells_otherwise_is_not_published(
    runs: dict[str, fewstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fewstep.export_kohya.kohya_tensors", without_the_last)
    for form in ("lora", "pipeline"):
        with pytest.raises(UserError, match=r"kohya_lora_weights.safetensors is not the adapter"):
            export_run(runs["adapter"], tmp_path / "export", form=form)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def without_the_last(adapter: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    tensors = kohya_tensors(adapter, blocks)
    tensors.popitem()
    return tensors


def test_a_student_that_is_no_adapter_has_none(
    runs: dict[str, fewstep.Run], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--format lora: the student has a network of its own"):
        export_run(runs["whole"], tmp_path / "lora", form="lora")


# The network alone, and networks on pixels.


def test_the_network_alone_finds_its_teachers_parts(
    runs: dict[str, fewstep.Run], tmp_path: Path, fewstep: Any
) -> None:
    run, out = runs["whole"], tmp_path / "network"
    code, text, _ = fewstep("export", run.directory, "--out", out, "--format", "network")
    assert code == 0
    assert "same images" in text
    assert not (out / "vae").exists()
    source = open_source(out)
    images = source.sample(source.encode(list(PROMPTS)), source.sampler(None), 5).images
    torch.testing.assert_close(images, run.sample(3, seed=5).images, rtol=0, atol=1e-4)


@pytest.fixture
def pixels(tmp_path: Path) -> fewstep.Run:
    size = {k: v for k, v in TINY_SD3.items() if k != "out_channels"}
    wanted = recipe(tmp_path / "run", {"network": size | {"dual_attention_layers": []}})
    model = wanted.model.build()
    return fewstep.train(wanted, data=Texts(model.example_condition(3), PROMPTS[:2]))


def test_a_network_on_pixels_is_exported_and_sampled_by_encoded_prompts(
    pixels: fewstep.Run, tmp_path: Path
) -> None:
    directory = export_run(pixels, tmp_path / "export")
    kinds = {p.name for p in directory.iterdir() if p.is_dir()}
    assert kinds == {"transformer", "scheduler"}
    text = (directory / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    condition = pixels.roles.model.example_condition(2)
    names = {"prompt_embeds": condition["prompt_embeds"], "pooled": condition["pooled"]}
    torch.manual_seed(0)
    exec(
        compile(code.replace('directory = "."', f"directory = {str(directory)!r}"), "R", "exec"),
        names,
    )
    spec = pixels.method.sampler()
    (ours,) = sampled(pixels.roles, "student", spec, condition)
    torch.testing.assert_close(names["samples"], ours, rtol=0, atol=1e-4)
    assert open_source(directory).roles.model.sample_shape == (4, 8, 8)


# The rollout engine.


@pytest.mark.parametrize("transition", ["euler", "renoise"])
def test_a_pipeline_makes_the_samples_of_the_student(
    teacher: Path, tmp_path: Path, transition: str
) -> None:
    wanted = recipe(tmp_path / "run", {"weights": str(teacher)}, transition=transition)
    wanted = resolve_recipe(wanted)
    model = wanted.model.build()
    worker = build_worker(wanted, model, None, load_weights(wanted, model), roles=("student",))
    spec = worker.method.sampler()
    plain = worker.roles.storage.plain_network("student")
    engine = PipelineEngine.from_network(model, plain, spec)
    condition = model.example_condition(2)
    rollout = rollout_of_samples(model, spec, torch.arange(2), condition, 0, torch.float32)
    ours, theirs = StudentEngine(worker.roles).generate(rollout), engine.generate(rollout)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_a_run_in_lower_precision_is_compared_in_full(teacher: Path, tmp_path: Path) -> None:
    wanted = recipe(
        tmp_path / "run",
        {"weights": str(teacher)},
        storage="shared_base",
        runtime={"compute_dtype": "bfloat16", "activation_checkpointing": True},
    )
    items = texts(resolve_recipe(wanted).model.build())
    fewstep.train(wanted, data=items)
    # Opened without its data, random encodings stand for prompts.
    run = open_run(wanted.run_dir)
    assert run.items is None
    export_run(run, tmp_path / "export")
