"""Whether an export samples the same in plain diffusers as here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewstep.diffusion.prediction import Prediction
from fewstep.diffusion.samplers import sample_few_step
from fewstep.errors import UserError
from fewstep.export_lora import load_lora
from fewstep.methods.method import SamplerSpec, trained_transition
from fewstep.models.model import Condition, Denoiser
from fewstep.models.sd3 import SD3
from fewstep.parallel.compute import full_precision
from fewstep.pipeline import open_pipeline
from fewstep.pipeline_sd3 import KEPT
from fewstep.roles.role import Roles
from fewstep.roles.storage import SharedBase
from fewstep.run import Run

# Of the largest value, where that is more than one: what rounding may change.
TOLERANCE = 1e-4
PROMPTS = 4


def conditions_to_check(run: Run) -> dict[str, Tensor]:
    """What the samples that are compared are conditioned on: all classes, or a few prompts.

    Random encodings stand for prompts where the run has none.
    """
    model = run.roles.model
    if not model.prompted:
        labels = torch.arange(2 * (model.classes or 1)) % (model.classes or 1)
        return {"class_labels": labels}
    if run.items is None:
        return model.example_condition(PROMPTS)
    count = min(PROMPTS, len(run.items))
    return dict(run.conditions(count).of(torch.arange(count)))


def check_samples(
    what: str, run: Run, role: str, spec: SamplerSpec, make: Callable[[Condition], list[Tensor]]
) -> None:
    """Raise UserError unless samples made elsewhere are those of a role.

    Args:
        what: made them, for messages.
        run: holds the role.
        role: whose samples.
        spec: how they are made.
        make: condition -> samples, and images of them if there are any, from a generator of
            seed 0 which gives the noise of each step in turn.
    """
    condition = conditions_to_check(run)
    ours, theirs = sampled(run.roles, role, spec, condition), make(condition)
    if not all(part.isfinite().all() for part in (*ours, *theirs)):
        raise UserError(
            f"export: the samples of {role} after cycle {run.cycle} are not finite; nothing "
            f"was written. Export an earlier checkpoint, or train with a lower learning rate"
        )
    difference = compared(ours, theirs)
    if not difference <= TOLERANCE:
        raise UserError(
            f"export: {what} gives images that differ from ours by {difference:.2g} (at most "
            f"{TOLERANCE:.0e} is rounding); nothing was written"
        )


def compared(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest difference, as a share of our largest value where that is more than one."""
    return max(
        float((a - b).abs().max()) / max(1.0, float(a.abs().max()))
        # An export without an autoencoder makes no images to compare.
        for a, b in zip(ours, theirs, strict=False)
    )


def sampled(roles: Roles, role: str, spec: SamplerSpec, condition: Condition) -> list[Tensor]:
    """Our samples of a role, and their images in [0, 1] where it works on latents."""
    with torch.no_grad(), roles.use(role) as denoiser, full_precision(denoiser.network):
        return _sampled(roles, denoiser, spec, condition)


def with_lora(
    roles: Roles, spec: SamplerSpec, directory: Path, condition: Condition
) -> list[Tensor]:
    """The same of the untouched base with an adapter that diffusers has loaded."""
    assert isinstance(roles.storage, SharedBase)
    network = load_lora(roles.storage.plain_network(SharedBase.base_role), directory)
    with torch.no_grad(), full_precision(network):
        denoiser = Denoiser(roles.model, network, lambda: None)
        return _sampled(roles, denoiser, spec, condition)


def _sampled(
    roles: Roles, denoiser: Denoiser, spec: SamplerSpec, condition: Condition
) -> list[Tensor]:
    model, generator = roles.model, torch.Generator().manual_seed(0)
    placed = {key: value.to(roles.device) for key, value in condition.items()}
    count = len(next(iter(placed.values())))

    def noise(step: int) -> Tensor:
        shape = (count, *model.sample_shape)
        return torch.randn(shape, generator=generator).to(roles.device, roles.dtype)

    def predict(x: Tensor, sigma: Tensor) -> Prediction:
        return denoiser(x, sigma, placed)

    kind = trained_transition(spec.solver)
    samples = sample_few_step(predict, model.path.prior(noise(0)), spec.sigmas, kind, noise)
    images = model.decode(samples)
    found = [samples] if images is samples else [samples, (images / 2 + 0.5).clamp(0, 1)]
    return [part.cpu().float() for part in found]


def by_diffusers(roles: Roles, directory: Path, condition: Condition) -> list[Tensor]:
    """The same by plain diffusers, loaded as the export's README says and called by default."""
    generator = torch.Generator().manual_seed(0)
    if not isinstance(roles.model, SD3):
        pipeline = open_pipeline(directory).to(roles.device)
        return [pipeline(condition["class_labels"], generator=generator).cpu().float()]
    # Prompts are given as they were encoded; the encoders themselves are mere copies.
    encoders = [key for key in KEPT if key != "vae"]
    pipeline = open_pipeline(directory, but=encoders).to(roles.device)
    if pipeline.vae is not None:
        pipeline.vae.enable_slicing()  # one image at a time: large ones take gigabytes
    latents: list[Tensor] = []

    def keep(
        pipeline: Any, step: int, timestep: Tensor, values: dict[str, Tensor]
    ) -> dict[str, Any]:
        latents.append(values["latents"])
        return {}

    images = pipeline(
        prompt_embeds=condition["prompt_embeds"].to(roles.device, torch.float32),
        pooled_prompt_embeds=condition["pooled"].to(roles.device, torch.float32),
        generator=generator,
        output_type="pt" if pipeline.vae is not None else "latent",
        callback_on_step_end=keep,
    ).images
    found = [latents[-1], images] if pipeline.vae is not None else [images]
    return [part.cpu().float() for part in found]


def has_lora(network: nn.Module) -> bool:
    """Whether diffusers can put an adapter on such a network."""
    return hasattr(network, "load_lora_adapter")
