"""Directories with weights: on this machine, or by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from fewstep.errors import UserError

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
# A repository may hold the same weights several times: for other programs, in other precisions.
COMPONENTS = (
    "transformer",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
    "scheduler",
)
HALF_PRECISION = ("*.fp16.*", "*.fp16-*")
NOT_NEEDED = ("*.bin", "*.msgpack", "*.onnx*", *HALF_PRECISION)


def split_hub_name(name: str) -> tuple[str, str | None] | None:
    """OWNER/NAME and REVISION, or None, of a name on the hub; None for a path."""
    found = HUB_NAME.fullmatch(name)
    if found is None or Path(name).exists():
        return None
    repository, revision = found.groups()
    return repository, revision


def present_directory_of(name: str, key: str) -> Path:
    """`directory_of` for what is read now.

    Raises:
        UserError: where there is no such directory, or it cannot be had from the hub.
    """
    directory = directory_of(name, key)
    if not directory.is_dir():
        raise UserError(f"{key}: {name} is not a directory")
    return directory


def directory_of(name: str, key: str) -> Path:
    """The directory that a recipe names; one on the hub is downloaded, or found in its cache.

    Args:
        name: a path, or OWNER/NAME on the hub, or OWNER/NAME@REVISION for a commit, branch or tag
            of it; a path that exists comes first.
        key: of the recipe, for messages.

    Raises:
        UserError: where it cannot be had from the hub. A path may be that of nothing: a run goes on
            without what it has read already.
    """
    on_hub = split_hub_name(name)
    if on_hub is None:
        return Path(name)
    repository, revision = on_hub
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    there = f"{key}: {name} is no directory here, and on the Hugging Face hub"
    patterns = ["model_index.json", *(f"{component}/*" for component in COMPONENTS)]
    try:
        found = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=list(NOT_NEEDED),
        )
    except GatedRepoError as error:
        raise UserError(
            f"{there} it is gated: accept its licence at https://huggingface.co/{repository}, then "
            f"log in by `hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{there} it has no commit, branch or tag {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{there} it does not exist, or is private: check the name, or log in by "
            f"`hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{there} it could not be reached, nor is all of it in the cache. Check the path or "
            f"the connection (HF_HUB_OFFLINE must not be set), or download it where there is one "
            f"by `hf download {repository}{f' --revision {revision}' * bool(revision)}`: {error}"
        ) from error
    return Path(found)
