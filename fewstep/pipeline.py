"""A student as a pipeline of plain diffusers: what a directory holds, and how it is opened."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.utils.constants import HF_MODULES_CACHE
from torch import Tensor, nn

from fewstep.diffusion.paths import RectifiedFlow
from fewstep.errors import UserError
from fewstep.methods.method import SamplerSpec
from fewstep.models.components import no_progress_bars
from fewstep.models.dit import DiT
from fewstep.models.model import Condition, Model
from fewstep.models.sd3 import SD3
from fewstep.pipeline_sd3 import sd3_index

# What the scheduler multiplies a sigma by: its own default.
TIMESTEP_SCALE = 1000.0
TEMPLATES = files("fewstep") / "templates"


def check_model(model: Model, spec: SamplerSpec, what: str) -> None:
    """Raise UserError unless a diffusers pipeline can sample these networks.

    Args:
        model: their adapter.
        spec: how they are sampled.
        what: the error is about.
    """
    if not isinstance(model, DiT | SD3):
        raise UserError(f"{what}: {type(model).__name__} is not a family that diffusers has")
    if not isinstance(model.path, RectifiedFlow) or model.prediction != "velocity":
        raise UserError(
            f"{what}: FlowMatchEulerDiscreteScheduler samples networks that predict velocity; "
            f"model.prediction is {model.prediction!r}"
        )
    if model.path.timestep_scale != TIMESTEP_SCALE:
        raise UserError(
            f"{what}: FlowMatchEulerDiscreteScheduler tells networks sigma times "
            f"{TIMESTEP_SCALE:g}; model.timestep_scale is {model.path.timestep_scale:g}"
        )
    if spec.solver == "heun" or spec.guidance != 1:
        raise UserError(
            f"{what}: a pipeline samples without guidance and with one network call a step; "
            f"method.sampling has solver {spec.solver!r} and guidance {spec.guidance}. Take "
            f"a distilled student instead, or set them to 'euler' and 1"
        )


def write_pipeline(model: Model, network: nn.Module, spec: SamplerSpec, directory: Path) -> None:
    """Write what `DiffusionPipeline.from_pretrained` needs: network, scheduler and pipeline.

    Args:
        model: the adapter; see `check_model`.
        network: a plain one, on the CPU.
        spec: how it is sampled.
        directory: exists; what it holds of other components belongs to the pipeline.
    """
    model.save_network(network, directory / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=1.0, stochastic_sampling=spec.solver == "renoise"
    )
    scheduler.save_pretrained(directory / "scheduler")
    template = "pipeline_sd3.py" if isinstance(model, SD3) else "pipeline.py"
    (directory / "pipeline.py").write_text((TEMPLATES / template).read_text())
    index: dict[str, object] = {
        "_class_name": ["pipeline", "FewStepPipeline"],
        "transformer": ["diffusers", type(network).__name__],
        "scheduler": ["diffusers", type(scheduler).__name__],
        "sigmas": list(spec.sigmas),
    }
    if isinstance(model, SD3):
        index = sd3_index(model, spec, type(scheduler).__name__, directory)
    (directory / "model_index.json").write_text(json.dumps(index, indent=2))


def open_pipeline(directory: Path, but: Sequence[str] = ()) -> Any:
    """An export as diffusers' own object, loaded as its README says.

    Args:
        directory: of the export.
        but: components that are not loaded.
    """
    with no_progress_bars(), _alone():
        pipeline = DiffusionPipeline.from_pretrained(
            directory,
            custom_pipeline=str(directory),
            trust_remote_code=True,
            **dict.fromkeys(but),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call_network(network: nn.Module, x: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
    """A network of diffusers, called as its own pipelines call it: the velocity, like `x`.

    Args:
        network: of a family that `check_model` lets pass.
        x: [B, ...].
        timestep: [].
        condition: each entry [B, ...].
    """
    timesteps = timestep.expand(len(x))
    if "class_labels" in condition:
        return cast(Tensor, network(x, timesteps, condition["class_labels"]).sample)
    return cast(
        Tensor,
        network(
            hidden_states=x,
            timestep=timesteps,
            encoder_hidden_states=condition["prompt_embeds"].to(x.dtype),
            pooled_projections=condition["pooled"].to(x.dtype),
            return_dict=False,
        )[0],
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process of a machine at a time import a pipeline's code.

    Diffusers copies it to one place for all, and another's copy must not come in between.
    """
    folder = Path(HF_MODULES_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fewstep.lock").open("w") as file:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
