"""From a role to a directory that plain diffusers loads, checked by loading it back."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from string import Template
from typing import final

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from fewstep.diffusion.samplers import Transition, sample_few_step
from fewstep.errors import UserError
from fewstep.files import saving
from fewstep.methods.method import SamplerSpec, trained_transition
from fewstep.models import ModelSettings
from fewstep.pipeline import TEMPLATES, check_model, open_pipeline, write_pipeline
from fewstep.roles.role import STUDENT, STUDENT_EMA, Roles
from fewstep.roles.storage import SharedBase
from fewstep.run import Run
from fewstep.settings import Settings

DESCRIPTION = "fewstep.json"
TOLERANCE = 1e-4

_ADAPTER = (
    "`lora/` holds the adapter alone. `DiTTransformer2DModel` itself has no `load_lora_adapter`: "
    "the network\nin `transformer/` has the adapter merged already.\n\n"
)


@final
class ExportDescription(Settings):
    """What `fewstep.json` in an export says.

    Attributes:
        model: the recipe's model section.
        sigmas: the grid, as it was trained.
        solver: "renoise" or "euler".
        role: whose weights these are.
        cycle: after which they were saved.
        data: name of the data set to evaluate against.
    """

    model: ModelSettings
    sigmas: tuple[float, ...]
    solver: Transition
    role: str
    cycle: int
    data: str


def export_run(run: Run, directory: Path | str, role: str | None = None) -> Path:
    """Write a role of a run as a diffusers directory, and check it.

    Args:
        run: opened at the checkpoint to export.
        directory: to write; must not exist, or be an earlier export.
        role: student or student_ema; by default the run's result.

    Returns:
        The directory, as an absolute path.

    Raises:
        UserError: where the role is not there or never moved, the network is of a kind that
            diffusers' schedulers do not sample, its samples are not finite, or the directory
            cannot be written.
    """
    # Absolute: "." has no name, and after it is replaced it is no longer where it was.
    directory, role = Path(directory).resolve(), role or run.result_role
    check_role(run, role)
    model, spec = run.roles.model, run.method.sampler()
    check_model(model, spec, "export")
    check_export_directory(directory)
    check_export_directory(_set_aside(directory))
    temporary = directory.parent / f".{directory.name}.tmp"
    with saving(directory, lambda: shutil.rmtree(temporary, ignore_errors=True)):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_export(run, role, spec, temporary)
        difference = largest_difference(run.roles, role, spec, temporary)
        if not math.isfinite(difference):
            raise UserError(
                f"export: the samples of {role} after cycle {run.cycle} are not finite; nothing "
                f"was written. Export an earlier checkpoint, or train with a lower learning rate"
            )
        if not difference <= TOLERANCE:
            raise UserError(
                f"export: plain diffusers gives images that differ from ours by {difference:.2g} "
                f"(at most {TOLERANCE:.0e} is rounding); nothing was written"
            )
        replace_export(directory, temporary)
    return directory


def replace_export(directory: Path, new: Path) -> None:
    """Move a new export into place; at every moment the old or the new one is on the disk."""
    old = _set_aside(directory)
    if directory.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(directory, old)
    try:
        os.rename(new, directory)
    except BaseException:
        if old.exists():
            os.rename(old, directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _set_aside(directory: Path) -> Path:
    """Where an export waits while it is replaced."""
    return directory.parent / f".{directory.name}.old"


def check_role(run: Run, role: str) -> None:
    """Raise UserError unless the role can be exported from this run."""
    choices = [name for name in (STUDENT, STUDENT_EMA) if name in run.roles]
    if role not in choices:
        raise UserError(f"--role {role}: this run has {' and '.join(choices)}")
    if run.roles[STUDENT].successful == 0:
        raise UserError(f"--role {role}: the student has had no update up to cycle {run.cycle}")
    if role == STUDENT_EMA and run.roles.ema_updates == 0:
        start = run.roles.ema.start if run.roles.ema is not None else 0
        raise UserError(
            f"--role student_ema: it was never updated (ema.start is {start}, the student has "
            f"had {run.roles[STUDENT].successful} updates): it equals the initial student. "
            f"Export --role student, or train with a lower ema.start"
        )


def check_export_directory(directory: Path) -> None:
    """Raise UserError unless the directory is new, empty or an export that may be replaced."""
    if not directory.exists():
        return
    replaceable = directory.is_dir() and (
        (directory / DESCRIPTION).is_file() or not any(directory.iterdir())
    )
    if not replaceable:
        raise UserError(f"{directory} exists and is no export: choose another with --out")


def write_export(run: Run, role: str, spec: SamplerSpec, directory: Path) -> None:
    """Write network, scheduler, pipeline, adapter, description and README."""
    storage = run.roles.storage
    network = storage.plain_network(role).to(device="cpu")
    write_pipeline(run.roles.model, network, spec, directory)
    if isinstance(storage, SharedBase):
        export_lora(storage, role, directory / "lora")
    description = ExportDescription(
        model=run.recipe.model.model_copy(update={"weights": None}),
        sigmas=spec.sigmas,
        solver=trained_transition(spec.solver),
        role=role,
        cycle=run.cycle,
        data=run.recipe.data.name,
    )
    (directory / DESCRIPTION).write_text(description.model_dump_json(indent=2))
    readme = Template((TEMPLATES / "export_readme.md").read_text()).substitute(
        steps=spec.steps,
        sigmas=list(spec.sigmas),
        role=role,
        cycle=run.cycle,
        adapter=_ADAPTER if isinstance(storage, SharedBase) else "",
    )
    (directory / "README.md").write_text(readme)


def export_lora(storage: SharedBase, role: str, directory: Path) -> Path:
    """Write a role's adapter as `pytorch_lora_weights.safetensors`.

    Networks of diffusers with LoRA support read it by `network.load_lora_adapter(directory,
    weight_name="pytorch_lora_weights.safetensors")`, pipelines by `load_lora_weights(directory)`.
    """
    base = storage.networks["base"]
    tensors = get_peft_model_state_dict(base, adapter_name=role)
    config = base.peft_config[role].to_dict()  # type: ignore[union-attr, index]
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "pytorch_lora_weights.safetensors"
    save_file(
        {f"transformer.{key}": value.cpu().contiguous() for key, value in tensors.items()},
        file,
        # diffusers finds rank and alpha under this key.
        metadata={
            "format": "pt",
            "lora_adapter_metadata": json.dumps(
                {f"transformer.{key}": value for key, value in config.items()}, default=str
            ),
        },
    )
    return file


def sample_with_diffusers(directory: Path, labels: Tensor, seed: int) -> Tensor:
    """Sample an export with diffusers alone, as its README says: [N, C, H, W]."""
    pipeline = open_pipeline(directory)
    images: Tensor = pipeline(labels, generator=torch.Generator().manual_seed(seed))
    return images


def largest_difference(roles: Roles, role: str, spec: SamplerSpec, directory: Path) -> float:
    """Largest absolute difference between plain diffusers' images of an export and ours.

    Both take their noise from a generator of the same seed, in the same order.
    """
    model = roles.model
    labels = torch.arange(2 * (model.classes or 1)) % (model.classes or 1)
    theirs = sample_with_diffusers(directory, labels, seed=0)
    generator = torch.Generator().manual_seed(0)

    def noise(step: int) -> Tensor:
        shape = (len(labels), *model.sample_shape)
        return torch.randn(shape, generator=generator).to(roles.device, roles.dtype)

    condition = {"class_labels": labels.to(roles.device)}
    with torch.no_grad(), roles.use(role) as denoiser:
        ours = sample_few_step(
            lambda x, sigma: denoiser(x, sigma, condition),
            model.path.prior(noise(0)),
            spec.sigmas,
            trained_transition(spec.solver),
            noise,
        )
    return float((ours.cpu().float() - theirs.float()).abs().max())
