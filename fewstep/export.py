"""From a role to a directory that plain diffusers loads, checked by loading it back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fewstep.config import Recipe
from fewstep.errors import UserError
from fewstep.export_check import by_diffusers, check_samples, has_lora, with_lora
from fewstep.export_description import DESCRIPTION, HERE, ExportDescription
from fewstep.export_kohya import check_kohya, export_kohya
from fewstep.export_lora import LORA_FILE, export_lora
from fewstep.export_readme import BASE, ExportFormat, base_of, dit_readme, sd3_readme
from fewstep.files import check_place, permit_as_usual, saving
from fewstep.methods.method import SamplerSpec, trained_transition
from fewstep.models.hub import directory_of
from fewstep.models.model import Model, empty_network
from fewstep.models.sd3 import SD3, SD3Settings
from fewstep.pipeline import check_model, write_pipeline
from fewstep.pipeline_sd3 import KEPT, copy_components
from fewstep.roles.role import STUDENT, STUDENT_EMA, TEACHER_SCORE
from fewstep.roles.storage import SharedBase
from fewstep.run import Run


def export_run(
    run: Run,
    directory: Path | str,
    role: str | None = None,
    form: ExportFormat = "pipeline",
    verify: bool = True,
) -> Path:
    """Write a role of a run for diffusers, and check it.

    Args:
        run: opened at the checkpoint to export.
        directory: to write; must not exist, or be an earlier export.
        role: student or student_ema; by default the run's result.
        form: "pipeline": all that sampling needs, of a text-to-image network also the teacher's
            text encoders and autoencoder; "network": without those; "lora": the adapter alone.
        verify: load it back in plain diffusers and compare its samples with ours.

    Returns:
        The directory, as an absolute path.

    Raises:
        UserError: where the role is not there or never moved, the network is of a kind that
            diffusers' schedulers do not sample, its samples are not finite, or the directory
            cannot be written.
    """
    # Absolute: "." has no name, and after it is replaced it is no longer where it was.
    directory = Path(directory).resolve()
    check_request(run.recipe, run.roles.model, directory, role, form)
    return export_checked(run, directory, role, form, verify)


def export_checked(
    run: Run, directory: Path, role: str | None, form: ExportFormat, verify: bool
) -> Path:
    """`export_run` of what `check_request` has passed already; `directory`: absolute."""
    role = role or run.result_role
    check_updates(run, role)
    spec = run.method.sampler()
    temporary = directory.parent / f".{directory.name}.tmp"
    with saving(directory, lambda: shutil.rmtree(temporary, ignore_errors=True)):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_export(run, role, spec, temporary, form)
        if verify:
            verify_export(run, role, spec, temporary)
        replace_export(directory, temporary)
    return directory


def verify_export(run: Run, role: str, spec: SamplerSpec, directory: Path) -> None:
    """Raise UserError unless plain diffusers gives our samples of all that an export holds.

    Of an adapter's two files, one is sampled, and the other compared with it.
    """
    roles = run.roles
    if (directory / "transformer").is_dir():
        check_samples(
            "plain diffusers", run, role, spec, lambda c: by_diffusers(roles, directory, c)
        )
    file = next(iter(directory.rglob(LORA_FILE)), None)
    if file is not None and has_lora(roles.storage.networks["base"]):
        check_samples(
            "the adapter in plain diffusers",
            run,
            role,
            spec,
            lambda c: with_lora(roles, spec, file.parent, c),
        )
        if isinstance(roles.model, SD3):
            check_kohya(roles.model, file.parent)


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


def check_request(
    recipe: Recipe, model: Model, directory: Path, role: str | None, form: ExportFormat
) -> None:
    """Raise UserError for what is known to be impossible before any weights are read.

    Args:
        recipe: of the run.
        model: the adapter.
        directory: to write.
        role: whose weights; None: the run's result.
        form: see `export_run`.
    """
    choices = [name for name in (STUDENT, STUDENT_EMA) if name in recipe.roles]
    if role is not None and role not in choices:
        raise UserError(f"--role {role}: this run has {' and '.join(choices)}")
    check_model(model, recipe.method.build().sampler(), "export")
    if form == "lora":
        check_adapter(recipe, model)
    if form == "pipeline" and isinstance(model, SD3) and model.settings.text_encoder is None:
        recipe.data.check_encoders(model.encoding(), "--format pipeline")
    check_place(directory.parent, "--out")
    for place in (directory, _set_aside(directory)):
        check_export_directory(place)


def check_updates(run: Run, role: str) -> None:
    """Raise UserError where a role is what it was when the run began."""
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


def check_adapter(recipe: Recipe, model: Model) -> None:
    """Raise UserError unless the student is an adapter that diffusers has a form for."""
    if recipe.storage != "shared_base":
        raise UserError(
            f"--format lora: the student has a network of its own (storage: {recipe.storage}); "
            f"only one with storage: shared_base is an adapter"
        )
    network = empty_network(model.build_network)
    if not has_lora(network):
        raise UserError(
            f"--format lora: diffusers' {type(network).__name__} takes no adapters; use --format "
            f"pipeline, where it is merged into the network"
        )


def write_export(
    run: Run, role: str, spec: SamplerSpec, directory: Path, form: ExportFormat = "pipeline"
) -> None:
    """Write what a format asks for: components, network, scheduler, adapter, and what it is."""
    model, storage = run.roles.model, run.roles.storage
    settings = run.recipe.model.model_copy(update={"weights": None})
    if isinstance(settings, SD3Settings) and settings.pipeline is not None:
        source = directory_of(settings.pipeline, "model.pipeline")
        if form == "pipeline":
            # Encoders that the network does not know would give it nonsense.
            copy_components(source, directory, ["vae"] if settings.text_encoder else KEPT)
        # What is copied is looked for in the export; the rest stays where it is.
        named = settings.pipeline if source != Path(settings.pipeline) else str(source.resolve())
        settings = settings.model_copy(update={"pipeline": HERE if form == "pipeline" else named})
    if form != "lora":
        network = storage.plain_network(role).to(device="cpu")
        write_pipeline(model, network, spec, directory)
        permit_as_usual((directory / "transformer").glob("*.safetensors"))
    if isinstance(storage, SharedBase):
        folder = directory if form == "lora" else directory / "lora"
        export_lora(storage, role, folder)
        if isinstance(model, SD3):
            export_kohya(folder, model.config.num_layers)
            if form == "lora" and base_of(run) == "run":
                model.save_network(storage.plain_network(TEACHER_SCORE).to("cpu"), folder / BASE)
        permit_as_usual(folder.rglob("*.safetensors"))
    description = ExportDescription(
        model=settings,
        sigmas=spec.sigmas,
        solver=trained_transition(spec.solver),
        role=role,
        cycle=run.cycle,
        data=run.recipe.data.name,
    )
    (directory / DESCRIPTION).write_text(description.model_dump_json(indent=2))
    readme = sd3_readme if isinstance(model, SD3) else dit_readme
    (directory / "README.md").write_text(readme(run, role, spec, form))
