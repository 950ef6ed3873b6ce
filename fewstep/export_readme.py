"""What the README of an export says: how to sample it in a few lines, and where it comes from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from string import Template
from typing import Literal

from fewstep.config import dump_recipe
from fewstep.errors import UserError
from fewstep.methods.method import SamplerSpec
from fewstep.models.hub import directory_of, split_hub_name
from fewstep.models.sd3 import SD3
from fewstep.models.sd3_files import DOWNSCALE, transformer_directory
from fewstep.pipeline import TEMPLATES
from fewstep.pretrained import is_run_directory
from fewstep.roles.role import TEACHER_SCORE
from fewstep.roles.storage import SharedBase
from fewstep.run import Run

BASE = "base"
"""Folder of an exported adapter for the network that it belongs on, if that is nowhere else."""

ExportFormat = Literal["pipeline", "network", "lora"]

_DIT_ADAPTER = (
    "`lora/` holds the adapter alone. `DiTTransformer2DModel` itself has no `load_lora_adapter`: "
    "the network\nin `transformer/` has the adapter merged already.\n\n"
)
_PIPELINE = """```python
from diffusers import DiffusionPipeline

directory = "."  # this directory
pipeline = DiffusionPipeline.from_pretrained(
    directory, custom_pipeline=directory, trust_remote_code=True
)
"""
_PROMPTED = """image = pipeline("a red cat on a roof").images[0]
```

Its code is in `pipeline.py`, and diffusers runs it with your leave only. Without that file the
directory is one for diffusers' own class, to which the trained sigmas have to be told:

```python
from diffusers import StableDiffusion3Pipeline

pipeline = StableDiffusion3Pipeline.from_pretrained(directory$without)
image = pipeline("a red cat on a roof", $arguments).images[0]
```
"""
_ENCODED = """samples = pipeline(
    prompt_embeds=prompt_embeds, pooled_prompt_embeds=pooled$latent
).images  # tensor [N, C, H, W]
```

`prompt_embeds` [N, L, $joint] and `pooled` [N, $pooled] are prompts as the network was trained
on them, by $encoder.
"""
_ADAPTER_ALONE = """$whence```python
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
$network
pipeline = StableDiffusion3Pipeline.from_pretrained($base$without)
pipeline.load_lora_weights(".")  # this directory
pipeline.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=$stochastic)
image = pipeline("a red cat on a roof", $arguments).images[0]
```

`pytorch_lora_weights.safetensors` has the names of diffusers, and its alpha is its rank.
"""
_KOHYA = """
`kohya_lora_weights.safetensors` is the same adapter as Kohya's sd-scripts write one, under the
names of the original network. ComfyUI knows those names and diffusers'.
"""
_BASE_NETWORK = """from diffusers import SD3Transformer2DModel

network = SD3Transformer2DModel.from_pretrained($name)"""
_BASE_ALONG = f"""The adapter belongs on the network in `{BASE}/`, which its run began with.

"""
_STOCHASTIC = """
Each step but the first begins with fresh noise (`stochastic_sampling` of the scheduler). diffusers'
own class takes it from torch's global generator, whatever `generator` it is given.
"""
_ADAPTER_TOO = """
`transformer/` has the adapter merged; `lora/` holds it alone, for `load_lora_weights` on $teacher:
that reads `pytorch_lora_weights.safetensors`.
"""
_DISTILLED = """Distilled with Fewstep (role `$role`, after cycle $cycle). It samples in $steps
network calls, on the sigmas that it was trained on, without guidance: a higher `guidance_scale`, or
other sigmas, spoil its images."""
_TRAINED = """Trained with Fewstep on data (role `$role`, after cycle $cycle). What follows samples
it in $steps steps, as it was validated; with other sigmas, and guided, it is like any network of
its kind."""


def dit_readme(run: Run, role: str, spec: SamplerSpec, form: ExportFormat) -> str:
    """How to sample a class-conditional student."""
    return Template((TEMPLATES / "export_readme.md").read_text()).substitute(
        **_nature(run, role, spec),
        sigmas=list(spec.sigmas),
        adapter=_DIT_ADAPTER if isinstance(run.roles.storage, SharedBase) else "",
    )


def sd3_readme(run: Run, role: str, spec: SamplerSpec, form: ExportFormat) -> str:
    """How to sample a text-to-image student, as a model card."""
    return Template((TEMPLATES / "export_readme_sd3.md").read_text()).substitute(
        **_nature(run, role, spec),
        usage=_usage(run, spec, form),
        recipe=dump_recipe(run.recipe),
    )


def _nature(run: Run, role: str, spec: SamplerSpec) -> dict[str, str]:
    """What an export is: a student, or a network that was trained on data."""
    base, distilled = run.recipe.model.weights, TEACHER_SCORE in run.recipe.roles
    what = Template(_DISTILLED if distilled else _TRAINED).substitute(
        role=role, cycle=run.cycle, steps=spec.steps
    )
    title = f"A {spec.steps}-step student of" if distilled else "A network trained from"
    return {
        "title": f"{title} `{base}`" if base is not None else title.rpartition(" ")[0],
        "what": what.replace("\n", " "),
        "tags": "few-step, distillation" if distilled else "flow-matching",
    }


def _usage(run: Run, spec: SamplerSpec, form: ExportFormat) -> str:
    model = run.roles.model
    assert isinstance(model, SD3)
    settings, stochastic = model.settings, spec.solver == "renoise"
    whole = settings.pipeline is not None and settings.text_encoder is None
    if whole and form != "network":
        text = _ADAPTER_ALONE if form == "lora" else _PIPELINE + _PROMPTED
    elif form == "lora":
        text = "$whence`pytorch_lora_weights.safetensors` is for `network.load_lora_adapter`.\n"
    else:
        text = _PIPELINE + _ENCODED
    text += _STOCHASTIC if stochastic else ""
    if isinstance(run.roles.storage, SharedBase):
        text += _KOHYA if form == "lora" else _ADAPTER_TOO + _KOHYA
    return Template(text).substitute(
        **_loading(run),
        without=_without(model),
        arguments=_arguments(model, spec),
        stochastic=stochastic,
        latent="" if settings.pipeline is None else ', output_type="latent"',
        joint=model.config.joint_attention_dim,
        pooled=model.config.pooled_projection_dim,
        encoder=f"`{settings.text_encoder or settings.pipeline or 'an encoder of their own'}`",
    )


Base = Literal["pipeline", "network", "run"]
"""Where the network that an adapter belongs on is: in the teacher's pipeline, by itself in a
directory or on the hub, or nowhere but in the run."""


def base_of(run: Run) -> Base:
    """Where the network is that a run began with."""
    model = run.roles.model
    assert isinstance(model, SD3)
    weights, pipeline = run.recipe.model.weights, model.settings.pipeline
    if weights is None or is_run_directory(Path(weights)):
        return "run"
    if split_hub_name(weights) is None and not Path(weights).is_dir():
        return "run"  # where it was is nothing now
    if pipeline is None:
        return "network"
    places = {transformer_directory(Path(name)).resolve() for name in (weights, pipeline)}
    return "pipeline" if len(places) == 1 else "network"


def _loading(run: Run) -> dict[str, str]:
    """The parts of the texts above that say where an adapter's base comes from."""
    model, weights = run.roles.model, run.recipe.model.weights
    assert isinstance(model, SD3)
    parts = {"base": _arguments_of(model.settings.pipeline), "network": "", "whence": ""}
    match base_of(run):
        case "pipeline":
            return parts | {"teacher": "the teacher's pipeline"}
        case "network":
            name = _arguments_of(weights) + _subfolder(weights or "")
            parts["teacher"] = f"the network that its run\nbegan with, `{weights}`"
        case "run":
            name = json.dumps(BASE)
            parts["whence"] = _BASE_ALONG
            parts["teacher"] = "the network that its run\nbegan with (`--format lora` adds it)"
    parts["network"] = Template(_BASE_NETWORK).substitute(name=name)
    parts["base"] += ", transformer=network"
    return parts


def _subfolder(name: str) -> str:
    """Where the network is, in the arguments of `from_pretrained`."""
    try:
        directory = directory_of(name, "model.weights")
    except UserError:  # it is gone, which is no reason to lose an export
        return ""
    return ', subfolder="transformer"' if transformer_directory(directory) != directory else ""


def _arguments_of(name: str | None) -> str:
    """A directory, or a name on the hub, as the arguments of `from_pretrained`."""
    on_hub = split_hub_name(name or "")
    if on_hub is None:
        return json.dumps(os.path.abspath(name or ""))
    repository, revision = on_hub
    return json.dumps(repository) + (f', revision="{revision}"' if revision is not None else "")


def _without(model: SD3) -> str:
    """What the stock class has to be told of a pipeline without T5."""
    name = model.settings.pipeline
    if name is None or (directory_of(name, "model.pipeline") / "text_encoder_3").is_dir():
        return ""
    return ", text_encoder_3=None, tokenizer_3=None"


def _arguments(model: SD3, spec: SamplerSpec) -> str:
    side = model.sample_shape[-1] * DOWNSCALE
    return (
        f"sigmas={list(spec.sigmas)}, num_inference_steps={spec.steps}, guidance_scale=1.0, "
        f"height={side}, width={side}, max_sequence_length={model.settings.max_sequence_length}"
    )
