"""The recipe's section `data`, one kind of section for each kind of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import Field, model_validator

from fewstep.data.dataset import Dataset, Split, load_dataset
from fewstep.data.encoded import EncodedItems, read_manifest
from fewstep.data.images import read_images
from fewstep.data.manifest import Plan, differences
from fewstep.data.prompts import read_prompts
from fewstep.data.sources import Record, changed, expand, holds, local, real
from fewstep.errors import UserError
from fewstep.models.encoders import VAE, Encoding
from fewstep.settings import Settings

Channel = Annotated[int, Field(ge=0, le=255)]


@final
class BuiltInData(Settings):
    """Data that need no preparation, or none at all."""

    name: Literal["digits", "custom", "none"] = Field(
        "none",
        description="digits: scikit-learn's handwritten digits; custom: passed from Python; "
        "none: no data",
    )

    def load(self, split: Split = "train") -> Dataset | None:
        """The data set, or None for "none" and "custom", and for what is held out."""
        return load_dataset(self.name) if split == "train" else None

    def facts(self) -> dict[str, Any]:
        """What decides the data, of these settings."""
        return {"name": self.name}

    def content(self) -> None:
        """Nothing more is known than `facts`."""

    def check(self, encoding: Encoding) -> None:
        """Nothing can have changed: nothing was encoded."""

    def check_encoders(self, encoding: Encoding, what: str) -> None:
        """Nothing can have changed: nothing was encoded."""


class TextToImageData(Settings, ABC):
    """What prompts and images have in common: they are encoded once, before a run."""

    name: str
    files: Annotated[list[str], Field(min_length=1)]
    column: str | None = None
    encoded: str = Field(description="directory of the encoded data, written by `fewstep encode`")
    validation: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="files of items that are held out, like `files`; null: see the next key"
    )
    validation_items: Annotated[int, Field(ge=0)] = Field(
        0, description="hold out so many of the last items of `files`"
    )
    on_bad: Literal["skip", "error"] = Field(
        "skip",
        description="what becomes of items that cannot be used: skip: they are left out, counted "
        "and listed; error: they are refused",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="in which text embeddings are stored; samples are always stored in float32",
    )
    batch_size: Annotated[int, Field(gt=0)] = Field(
        16, description="prompts or images that are encoded together"
    )
    shard_items: Annotated[int, Field(gt=0)] = Field(
        512, description="items in a file of the encoded data"
    )

    @model_validator(mode="after")
    def _check_validation(self) -> TextToImageData:
        if self.validation is not None and self.validation_items:
            raise ValueError(
                f"validation_items: {self.validation_items} is given, and validation as well; use "
                f"one of them"
            )
        if not self.encoded.strip():
            raise ValueError("encoded: is empty; name a directory")
        return self

    @abstractmethod
    def read(self, names: list[str]) -> list[Record]:
        """All records of some sources, in their order."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What decides the encoded data, of these settings."""

    @property
    def directory(self) -> Path:
        """Of the encoded data."""
        return Path(self.encoded)

    def sources(self) -> dict[Split, list[str]]:
        """The files, folders and hub ids of each split, as far as it has some of its own.

        Raises:
            UserError: for what does not exist, is in both splits, or would hold the encoded data.
        """
        found: dict[Split, list[str]] = {"train": expand("data.files", self.files)}
        if self.validation is not None:
            found["validation"] = expand("data.validation", self.validation)
            train = {real(name) for name in found["train"]}
            if both := [name for name in found["validation"] if real(name) in train]:
                raise UserError(f"data.validation: {', '.join(both)} is among data.files as well")
        for name in (name for names in found.values() for name in names):
            if holds(name, self.encoded):
                raise UserError(
                    f"data.encoded: {self.encoded} lies in {name}, a source of the data, which "
                    f"would change by it; name a directory outside"
                )
        return found

    def load(self, split: Split = "train") -> EncodedItems | None:
        """The encoded items; None where nothing is held out.

        Raises:
            UserError: where they are not there, damaged, or made from other settings.
        """
        manifest = read_manifest(self.directory)
        if found := differences({"data": manifest["plan"]["data"]}, {"data": self.facts()}):
            raise stale(self.directory, found)
        check_skipped(self, manifest["skipped"])
        return EncodedItems(self.directory, split) if split in manifest["splits"] else None

    def content(self) -> dict[str, Any] | None:
        """What the items are, wherever their sources lie; None where they are not there."""
        manifest = self._manifest_if_there()
        if manifest is None:
            return None
        plan = manifest["plan"]
        paths = ("files", "validation", "dtype", "image_size")
        return {key: value for key, value in self.facts().items() if key not in paths} | {
            "files": [stamp["sha256"] for stamp in plan["sources"].values()],
            "items": manifest["items"],
            "picture": plan["computed"]["picture"],
        }

    def check_encoders(self, encoding: Encoding, what: str) -> None:
        """See that prompts are encoded as those were that a network has learned from.

        Args:
            encoding: the network family's own.
            what: needs that, for the message.

        Raises:
            UserError: naming the encoders that have changed. Of encoded data that are gone,
                nothing is known.
        """
        manifest = self._manifest_if_there()
        if manifest is None:
            return
        found = changed_encoders(manifest["plan"], encoding, needed=True)
        if how := ", ".join(f"{name} {how}" for name, how in found):
            raise UserError(
                f"{what}: the encoders are not those that the prompts of the run were encoded by "
                f"({how}); put them back"
            )

    def _manifest_if_there(self) -> dict[str, Any] | None:
        try:
            return read_manifest(self.directory)
        except UserError:
            return None

    def check(self, encoding: Encoding) -> None:
        """Look whether what the data were made from, and by, has changed since; loads nothing.

        What is gone, or on a hub, cannot be compared. Files with the same names, sizes and times
        are not read again.

        Args:
            encoding: the network family's own.

        Raises:
            UserError: naming what has changed.
        """
        plan = read_manifest(self.directory)["plan"]
        known = plan["sources"]
        found = [f"  {name}: its content has changed" for name in changed(local(known), known)]
        try:
            present = {name for names in self.sources().values() for name in names}
        except UserError:
            present = set()  # some are gone
        found += [f"  {name}: is new" for name in sorted(local(present).keys() - known.keys())]
        found += differences({"model": plan["model"]}, {"model": encoding.settings})
        encoders = changed_encoders(plan, encoding, needed=False)
        found += [f"  encoders.{name}: {how}" for name, how in encoders]
        if found:
            raise stale(self.directory, found)


@final
class PromptData(TextToImageData):
    """Prompts, encoded by `fewstep encode`, for methods that need no images."""

    name: Literal["prompts"] = "prompts"
    files: Annotated[list[str], Field(min_length=1)] = Field(
        description="paths or globs of .txt (a prompt a line), .jsonl, .csv, .parquet and "
        "WebDataset .tar files, directories of datasets.save_to_disk, or hf: and the id of a data "
        "set on the Hugging Face hub"
    )
    column: str | None = Field(
        None, description="where the prompt is; null: text, and in a .tar the member .txt"
    )
    split: str = Field("train", description="of a Hugging Face data set that has several")

    def read(self, names: list[str]) -> list[Record]:
        """See `TextToImageData.read`."""
        return read_prompts(names, self.column, self.split)

    def facts(self) -> dict[str, Any]:
        """See `TextToImageData.facts`."""
        return common_facts(self) | {"split": self.split}


@final
class ImageData(TextToImageData):
    """Images with captions, encoded by `fewstep encode`."""

    name: Literal["images"] = "images"
    files: Annotated[list[str], Field(min_length=1)] = Field(
        description="paths or globs of folders of images, and of WebDataset .tar files"
    )
    column: str | None = Field(
        None,
        description="where the caption is, in a folder's metadata.jsonl or metadata.csv, or in a "
        ".tar's .json; null: text in metadata, and otherwise the .txt beside each image",
    )
    image_size: Annotated[int, Field(gt=0)] | None = Field(
        None, description="height and width in pixels; null: what the network is made for"
    )
    background: tuple[Channel, Channel, Channel] = Field(
        (255, 255, 255),
        description="red, green and blue: what is behind images that are transparent",
    )

    def read(self, names: list[str]) -> list[Record]:
        """See `TextToImageData.read`."""
        return read_images(names, self.column)

    def facts(self) -> dict[str, Any]:
        """See `TextToImageData.facts`."""
        own = {"image_size": self.image_size, "background": list(self.background)}
        return common_facts(self) | own


DATA = {
    "digits": BuiltInData,
    "custom": BuiltInData,
    "none": BuiltInData,
    "prompts": PromptData,
    "images": ImageData,
}

DataSettings = Annotated[BuiltInData | PromptData | ImageData, Field(discriminator="name")]


def common_facts(settings: TextToImageData) -> dict[str, Any]:
    """What decides encoded data of any kind."""
    keys = ("name", "files", "column", "validation", "validation_items", "dtype")
    return {key: getattr(settings, key) for key in keys}


def changed_encoders(plan: Plan, encoding: Encoding, *, needed: bool) -> Iterator[tuple[str, str]]:
    """Encoders that are not those of a plan, and how.

    Args:
        plan: of the encoded data.
        encoding: the network family's own.
        needed: whether prompts are to be encoded; if not, those of prompts may all be gone.
    """
    known, files = plan["encoders"], encoding.files
    yield from ((name, "its content has changed") for name in changed(files, known))
    there = {name for name, path in files.items() if path.exists()}
    yield from ((name, "is new") for name in sorted(there - known.keys()))
    # A network that samples by those that are left would be given other prompts than it has seen.
    prompts = known.keys() - {VAE}
    how = "is gone" if needed else "is gone, and others are not"
    if needed or prompts & there:
        yield from ((name, how) for name in sorted(prompts - there))


def check_skipped(settings: TextToImageData, skipped: list[list[str]]) -> None:
    """Raise UserError where items were left out that should have been refused."""
    if skipped and settings.on_bad == "error":
        where, problem = skipped[0]
        more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        raise UserError(
            f"{where}: {problem}{more}; put it right, or leave such items out by data.on_bad=skip"
        )


def stale(directory: Path, found: list[str]) -> UserError:
    """Encoded data are not what the recipe asks for."""
    return UserError(
        f"data.encoded: {directory} was made from something else:\n"
        + "\n".join(found)
        + "\nMake it anew with `fewstep encode RECIPE --overwrite`, or choose another directory"
    )
