"""The command `encode`: prompts and images of a recipe, encoded before a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fewstep.config import Recipe
from fewstep.data.directory import Encoded, check_own
from fewstep.data.encode import OnProgress, encode_data
from fewstep.data.settings import TextToImageData
from fewstep.errors import UserError
from fewstep.files import saving
from fewstep.launch.local import join_ranks
from fewstep.launch.lock import RunLock
from fewstep.launch.processes import Ended, check_devices, launch
from fewstep.launch.trials import check_device
from fewstep.models.model import Model
from fewstep.parallel.failures import Reached, telling_others
from fewstep.parallel.ranks import launched_ranks, leave
from fewstep.pretrained import resolve_model
from fewstep.sampling import cpu_threads

SHOWN = 10
"""Items that were left out, on screen; all of them are in the manifest."""


def encode(
    recipe: Recipe,
    *,
    model: Model | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Encoded:
    """Encode the prompts and images of a recipe into `data.encoded`.

    What is there already is kept, so an encoding that was stopped goes on. Under torchrun the
    ranks share the work.

    Args:
        recipe: its sections `data`, `model` and `runtime` count.
        model: the adapter of a network of your own (`model: {family: module}`).
        overwrite: begin anew, whatever the data that are there were made from.
        on_progress: told, on the first rank, how many items are done, and how many there are.

    Returns:
        What the directory holds now.

    Raises:
        UserError: where the data, the encoders or the directory cannot be used.
    """
    settings = to_encode(recipe)
    with (
        telling_others(launched_ranks() or 1, recipe.launch.timeout_seconds, Reached()),
        cpu_threads(recipe.runtime.threads),
        torch.no_grad(),
        RunLock(settings.directory, IN_USE) as lock,
    ):
        check_device(recipe.runtime.device)
        ranks = join_ranks(recipe)
        model = model or resolve_model(recipe).build()
        ranks.tell(lambda: take(settings, lock))
        dtype = recipe.runtime.torch_dtype
        return encode_data(
            settings,
            model,
            dtype,
            recipe.runtime.torch_compute_dtype or dtype,
            ranks,
            overwrite=overwrite,
            on_progress=on_progress or (lambda done, total: None),
        )


IN_USE = (
    "data.encoded: {directory} is in use: process {holder} writes there; wait for its end, or "
    "choose another directory"
)


def take(settings: TextToImageData, lock: RunLock) -> None:
    """Make the directory this process's own, as long as it writes there.

    Raises:
        UserError: where it holds something else, or lies in one of the sources; it is left alone.
    """
    directory = settings.directory
    settings.sources()
    check_own(directory)
    with saving(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()


def to_encode(recipe: Recipe) -> TextToImageData:
    """The data section of a recipe whose data are encoded; raises UserError for any other."""
    if not isinstance(recipe.data, TextToImageData):
        raise UserError(
            f"data.name: {recipe.data.name!r} needs no encoding; it is for 'prompts' and 'images'"
        )
    return recipe.data


def encode_in_processes(recipe: Recipe, arguments: Sequence[str]) -> Ended | None:
    """Run `fewstep encode <arguments>` in the processes that a recipe asks for.

    Returns:
        How they have ended; None where it is this process that runs it, alone or as a rank.
    """
    to_encode(recipe)
    if recipe.launch.processes == 1 or launched_ranks() is not None:
        return None
    check_devices(recipe)
    whole = ["-m", "fewstep", "encode", *arguments]
    return launch(whole, recipe.launch.processes, recipe.launch.grace_seconds)


def summary(encoded: Encoded, recipe: Path, overrides: Sequence[str]) -> Iterator[str]:
    """What is said at the end."""
    counts = ", ".join(f"{count} {split}" for split, count in encoded.items.items())
    size = f"{encoded.bytes / 2**20:.1f} MiB in {encoded.files} files"
    if encoded.made:
        yield f"Encoded: {counts} items, {size}, in {encoded.directory}"
    else:
        yield f"{encoded.directory} is complete already, and undamaged: {counts} items, {size}"
    if encoded.skipped:
        yield f"Skipped: {len(encoded.skipped)}, all listed in its manifest.json:"
        yield from (f"  {where}: {problem}" for where, problem in encoded.skipped[:SHOWN])
        if len(encoded.skipped) > SHOWN:
            yield f"  and {len(encoded.skipped) - SHOWN} more"
    if encoded.trained_on:
        yield (
            f"Held out: {encoded.trained_on} of {encoded.items['validation']} items have a prompt "
            f"that is trained on as well"
        )
    if encoded.cut:
        yield (
            f"Cut: {encoded.cut} prompts are longer than their encoder looks at: than "
            f"model.max_sequence_length, or 77 where CLIP is all there is"
        )
    if encoded.made:
        yield "Next: " + shlex.join(["fewstep", "train", str(recipe), *overrides])


def leave_encoding() -> None:
    """Wait for the other ranks at the end."""
    if launched_ranks() is not None:
        leave()
