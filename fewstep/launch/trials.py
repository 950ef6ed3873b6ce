"""What is tried before the first cycle: device, network, and what the teacher says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fewstep.build import seeded
from fewstep.data.dataset import Dataset
from fewstep.data.items import Items
from fewstep.diffusion.draw import Draw
from fewstep.errors import UserError
from fewstep.methods.dmd2 import sample_statistics
from fewstep.models.teacher_check import check_prediction
from fewstep.parallel.ranks import why_unusable
from fewstep.roles.role import STUDENT, TEACHER_SCORE, Roles
from fewstep.run import Run
from fewstep.sampling import placed, sample_role


def check_device(device: str) -> None:
    """Raise UserError for a device that is not there."""
    reason = why_unusable(device)
    if reason is not None:
        raise UserError(f"runtime.device: {device!r}: {reason}")


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Turn torch's refusals (impossible sizes, no memory) into a UserError that begins so."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"{what}: {lines[0]}") from error


def check_network(roles: Roles, seed: int) -> None:
    """Call a role's network once; raises UserError where it does not give what it is given."""
    model = roles.model
    denoisers = [name for name in roles if name not in roles.storage.heads]
    role = STUDENT if STUDENT in roles else denoisers[0]
    x, sigma, condition = model.example_call(2, roles.device, roles.dtype)
    # A network of the caller's may draw from the global generator.
    with (
        reporting("model: the network cannot be called"),
        seeded(seed, "trial"),
        torch.no_grad(),
        roles.use(role) as denoiser,
    ):
        output = model.forward(denoiser.network, x, sigma, condition)
    if output.shape != x.shape:
        raise UserError(
            f"model: the network returns shape {tuple(output.shape)}, its input has "
            f"{tuple(x.shape)}"
        )


def check_teacher(roles: Roles, seed: int, dataset: Items | None) -> None:
    """Let the teacher denoise some real samples, where there are any.

    Raises:
        UserError: where what it says makes much more sense as another kind of prediction.
    """
    if TEACHER_SCORE not in roles or dataset is None or not dataset.has_samples:
        return
    model, numbers = roles.model, torch.arange(min(16, len(dataset)))
    x0 = dataset.x0(numbers)
    x0 = (model.encode(x0) if isinstance(dataset, Dataset) else x0).to(roles.device, roles.dtype)
    condition = placed(dataset.condition(numbers), roles.device, roles.dtype)
    if condition.keys() != model.example_condition(1).keys() or x0.shape[1:] != model.sample_shape:
        return  # data of another kind, which samples are merely compared with
    ids = numbers.to(roles.device)
    eps = Draw(seed, 0, "teacher").normal("eps", ids, x0.shape[1:], roles.dtype)
    with roles.use(TEACHER_SCORE) as teacher:
        check_prediction(model, teacher.network, x0, eps, condition)


def teacher_statistics(run: Run, steps: int = 16) -> dict[str, float] | None:
    """Moments of the teacher's own samples, which the student's are held against.

    None where there is no teacher, or `logging.teacher_samples` is 0.
    """
    count = run.recipe.logging.teacher_samples
    if TEACHER_SCORE not in run.roles or not count:
        return None
    made = sample_role(
        run.roles,
        TEACHER_SCORE,
        run.method.sampler(steps, TEACHER_SCORE),
        run.conditions(count),
        batch_size=run.recipe.train.micro_batch_size or run.recipe.train.batch_size,
        ranks=run.worker.ranks,
        decode=False,
    )
    moments = {key: float(value) for key, value in sample_statistics(made.images).items()}
    square = moments.pop("sample_mean_square")
    return moments | {"sample_std": (square - moments["sample_mean"] ** 2) ** 0.5}
