"""Text encoders and autoencoders from directories: loaded without noise, and told apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fewstep.errors import UserError
from fewstep.files import digest

# What decides the output of a component; others' formats and notes lie beside it.
DECIDING = (".json", ".txt", ".model", ".safetensors")


def load_component(kind: Any, directory: Path, **options: Any) -> Any:
    """What a class of diffusers or transformers reads from a directory.

    Raises:
        UserError: where it is not there, or damaged.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} does not exist")
    try:
        with no_progress_bars():
            return kind.from_pretrained(str(directory), local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be loaded: {error}") from error


def checksums(root: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files of some of a directory's folders, by their path in it.

    Args:
        root: the directory.
        names: of folders; "." is the directory itself.
    """
    files = (file for name in names for file in sorted((root / name).iterdir()))
    return {
        file.relative_to(root).as_posix(): digest(file)
        for file in files
        if file.suffix in DECIDING and ".fp16." not in file.name and file.is_file()
    }


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep diffusers and transformers from drawing progress bars of what they load."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [
        logging
        for logging in (diffusers_logging, transformers_logging)
        if logging.is_progress_bar_enabled()
    ]
    for logging in shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging in shown:
            logging.enable_progress_bar()
