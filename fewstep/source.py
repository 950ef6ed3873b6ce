"""What can be sampled and evaluated: a run directory, an open run, or an export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

import torch

from fewstep.config import load_recipe
from fewstep.data.conditions import Conditions, conditions_in_turn, tensor_conditions
from fewstep.data.items import Items
from fewstep.data.settings import DATA, BuiltInData, DataSettings
from fewstep.errors import UserError
from fewstep.export_description import DESCRIPTION, read_description
from fewstep.methods.method import SamplerSpec
from fewstep.parallel.ranks import CPU, why_unusable
from fewstep.pretrained import RECIPE, Which, find_checkpoint, is_run_directory, open_role
from fewstep.roles.role import DISCRIMINATOR, STUDENT, STUDENT_EMA, TEACHER_SCORE, Roles
from fewstep.roles.storage import Independent
from fewstep.run import Run, prompts_that_are_left
from fewstep.sampling import Samples, cpu_threads, sample_role
from fewstep.training.metrics import logger
from fewstep.validation import sampled_role


@final
@dataclass(frozen=True)
class Source:
    """Something with a network, and how it wants to be sampled.

    Attributes:
        name: what results call it.
        path: of the run or export.
        roles: holds the network.
        role: whose network.
        sampler: steps (None: its own) -> how to sample.
        few_step: whether its own grid is the only one that it was trained on.
        data: the real data that it is judged by.
        threads: CPU threads to sample with; None: as many as torch uses already.
        items: whose prompts its samples have, where the network takes any.
        text_dtype: in which text encoders compute; None: that of the network's weights.
    """

    name: str
    path: Path
    roles: Roles
    role: str
    sampler: Callable[[int | None], SamplerSpec]
    few_step: bool
    data: DataSettings
    threads: int | None = None
    items: Items | None = None
    text_dtype: torch.dtype | None = None

    def conditions(self, count: int) -> Conditions:
        """Of samples that stand for all: prompts, those held out first, or classes, in turn.

        Raises:
            UserError: where the network takes prompts, and there are none.
        """
        if self.roles.model.prompted and self.items is None:
            raise UserError(
                f"{self.path}: this network takes prompts, and there are none: sample it with "
                f"--prompts or --prompt, or evaluate an export beside its run"
            )
        return conditions_in_turn(self.roles.model.classes, self.items, count)

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """The conditions of prompts, by the encoders of the network's family.

        Raises:
            UserError: where the network takes none, or its encoders cannot be loaded.
        """
        roles = self.roles
        self.data.check_encoders(roles.model.encoding(), "--prompt")
        encoder = roles.model.prompt_encoder(roles.device, self.text_dtype or roles.dtype)
        if cut := encoder.count_cut(prompts):
            logger.warning("prompts longer than their encoder looks at, which are cut: %d", cut)
        if self.items is None:  # which would have told it
            roles.model.take_unconditional({k: v[0] for k, v in encoder.encode([""]).items()})
        parts = [encoder.encode(prompts[i : i + 16]) for i in range(0, len(prompts), 16)]
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return tensor_conditions(joined, prompts)

    def sample(self, conditions: Conditions, spec: SamplerSpec, seed: int) -> Samples:
        """Samples of this source; noise depends on seed and position alone."""
        with cpu_threads(self.threads):
            return sample_role(self.roles, self.role, spec, conditions, seed=seed)


def open_source(
    path: Path | str,
    which: Which | None = None,
    role: str | None = None,
    device: str | None = None,
) -> Source:
    """Open a run directory or an export; of a run, only the network that is sampled.

    Args:
        path: of the run or export.
        which: "latest" or "best" checkpoint of a run; by default the best if there is one.
        role: whose network of a run; by default its result.
        device: to sample on; by default that of the run, or for an export an accelerator, and the
            CPU where that is not here.

    Raises:
        UserError: where there is neither, or it is damaged, or the device is not here.
    """
    path = Path(path)
    if (path / DESCRIPTION).is_file():
        return open_export(path, device)
    if not is_run_directory(path):
        raise UserError(
            f"{path} is neither a run directory (recipe.yaml) nor an export ({DESCRIPTION})"
        )
    recipe = load_recipe(path / RECIPE)
    denoisers = [name for name in recipe.roles if name != DISCRIMINATOR]
    role = role or sampled_role(denoisers)
    if role not in denoisers:
        raise UserError(f"--role {role}: {path} has {', '.join(denoisers)} to sample")
    model, method, runtime = recipe.model.build(), recipe.method.build(), recipe.runtime
    place = choose_device(device, runtime.device)
    compute = runtime.torch_compute_dtype
    return Source(
        path.name,
        path,
        open_role(recipe, model, role, find_checkpoint(path, which), place, compute),
        role,
        partial(method.sampler, role=role),
        TEACHER_SCORE in method.roles and role in (STUDENT, STUDENT_EMA),
        recipe.data,
        runtime.threads,
        prompts_that_are_left(recipe, model),
        compute,
    )


def open_teacher(paths: Sequence[Path], device: str | None = None) -> Source:
    """The frozen teacher of the first distilled run among some runs and exports.

    Raises:
        UserError: where none of them has one.
    """
    for path in filter(is_run_directory, paths):
        if TEACHER_SCORE in load_recipe(path / RECIPE).roles:
            found = open_source(path, role=TEACHER_SCORE, device=device)
            return replace(found, name=f"{found.name}'s teacher")
    raise UserError(
        "--teacher: none of these is a distilled run; name a teacher's own run instead, which is "
        "evaluated like any other"
    )


def run_source(run: Run) -> Source:
    """An open run as a source."""
    return Source(
        run.directory.name,
        run.directory,
        run.roles,
        run.result_role,
        run.method.sampler,
        TEACHER_SCORE in run.method.roles,
        run.recipe.data,
        run.recipe.runtime.threads,
        run.items,
        run.recipe.runtime.torch_compute_dtype,
    )


def open_export(directory: Path, device: str | None = None) -> Source:
    """Open an export, as `open_source` does; raises UserError where its files are damaged."""
    description = read_description(directory)
    if not (directory / "transformer").is_dir():
        raise UserError(
            f"{directory} is an adapter alone, to be loaded onto its base; sample its run, or "
            f"export it with --format pipeline"
        )
    model = description.model.build()
    network = model.load_network(directory / "transformer").float()
    here = torch.accelerator.current_accelerator(check_available=True)
    place = choose_device(device, str(here or CPU))
    spec = SamplerSpec(description.sigmas, description.solver)
    roles = Roles(model, Independent({STUDENT: network.to(place)}), (STUDENT,), {}, device=place)

    def sampler(steps: int | None) -> SamplerSpec:
        if steps not in (None, spec.steps):
            raise UserError(f"--steps {steps}: this export samples in {spec.steps}")
        return spec

    # Encoded prompts and images do not travel with an export.
    built_in = DATA.get(description.data) is BuiltInData
    data = BuiltInData.model_validate({"name": description.data if built_in else "none"})
    return Source(directory.name, directory, roles, STUDENT, sampler, True, data)


def choose_device(wanted: str | None, usual: str) -> torch.device:
    """The device to sample on: the wanted one, or the usual one if it is here, or the CPU.

    Raises:
        UserError: where the wanted one cannot be used.
    """
    device = wanted if wanted is not None else usual
    reason = why_unusable(device)
    if reason is None:
        return torch.device(device)
    if wanted is not None:
        raise UserError(f"--device: {wanted!r}: {reason}")
    logger.warning("sampling on the CPU: %r, where it was trained, is not here", usual)
    return CPU
