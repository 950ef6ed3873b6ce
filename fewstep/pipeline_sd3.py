"""A Stable Diffusion 3 student as a pipeline of diffusers, with what its teacher's has besides."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from fewstep.methods.method import SamplerSpec
from fewstep.models.files import read_config
from fewstep.models.hub import COMPONENTS, HALF_PRECISION, directory_of
from fewstep.models.sd3 import SD3
from fewstep.models.sd3_network import NETWORK_CLASS

# What the teacher's pipeline has that is not distilled, and the usual classes.
KEPT = {
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
}
ABSENT = [None, None]
assert {*KEPT, "transformer", "scheduler"} == set(COMPONENTS)


def sd3_index(model: SD3, spec: SamplerSpec, scheduler: str, directory: Path) -> dict[str, object]:
    """The content of model_index.json.

    Args:
        model: the adapter.
        spec: how it is sampled.
        scheduler: class name.
        directory: of the pipeline; what lies there of the teacher's parts is in the index.
    """
    kinds: dict[str, object] = dict(KEPT)
    if model.settings.pipeline is not None:
        source = directory_of(model.settings.pipeline, "model.pipeline") / "model_index.json"
        if source.is_file():
            kinds |= {key: value for key, value in read_config(source).items() if key in KEPT}
    return {
        "_class_name": ["pipeline", "FewStepPipeline"],
        "transformer": ["diffusers", NETWORK_CLASS],
        "scheduler": ["diffusers", scheduler],
        **{key: kinds[key] if (directory / key).is_dir() else ABSENT for key in KEPT},
        "image_encoder": ABSENT,
        "feature_extractor": ABSENT,
        "sigmas": list(spec.sigmas),
        "sample_size": model.sample_shape[-1],
        "max_sequence_length": model.settings.max_sequence_length,
    }


def copy_components(source: Path, directory: Path, names: Iterable[str] = KEPT) -> None:
    """Take over a pipeline's text encoders, tokenizers and autoencoder.

    Weights in half precision besides are left out. The others are hard links where source and
    directory are on one disk: they take no room twice, and nobody writes into them.

    Args:
        source: the teacher's pipeline; on the hub's cache its files are symbolic links.
        directory: the student's.
        names: of the parts that the student needs.
    """
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(
                source / name,
                directory / name,
                copy_function=link_weights,
                ignore=shutil.ignore_patterns(*HALF_PRECISION),
            )


def link_weights(source: str, target: str) -> str:
    """Copy a file, or link it if it holds weights; for `shutil.copytree`."""
    real = os.path.realpath(source)
    if source.endswith(".safetensors"):
        try:
            os.link(real, target)
        except OSError:  # another disk, or one without links
            pass
        else:
            return target
    return str(shutil.copy2(real, target))
