"""A role's adapter as a file that diffusers and other programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from fewstep.errors import UserError
from fewstep.models.components import no_progress_bars
from fewstep.models.files import SafetensorsWeights
from fewstep.roles.storage import SharedBase

LORA_FILE = "pytorch_lora_weights.safetensors"
# Before the name of each tensor: the component of a pipeline that it belongs to.
PREFIX = "transformer."


def export_lora(storage: SharedBase, role: str, directory: Path) -> Path:
    """Write a role's adapter as `pytorch_lora_weights.safetensors`.

    Networks of diffusers with LoRA support read it by `network.load_lora_adapter(directory,
    weight_name="pytorch_lora_weights.safetensors")`, pipelines by `load_lora_weights(directory)`.

    The scale alpha / rank is multiplied into the second matrix, and alpha is the rank then:
    programs that know nothing of diffusers' metadata, where alpha is kept, apply the adapter at
    its right strength too.
    """
    base = storage.networks["base"]
    config = base.peft_config[role].to_dict()  # type: ignore[union-attr, index]
    scale = config["lora_alpha"] / config["r"]
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    config["lora_alpha"] = config["r"]
    tensors = {
        key: value.cpu() * (scale if ".lora_B." in key or "lora_embedding_B" in key else 1.0)
        for key, value in get_peft_model_state_dict(base, adapter_name=role).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / LORA_FILE
    save_file(
        {f"{PREFIX}{key}": value.contiguous() for key, value in tensors.items()},
        file,
        # diffusers finds rank and alpha under this key.
        metadata={
            "format": "pt",
            "lora_adapter_metadata": json.dumps(
                {f"{PREFIX}{key}": value for key, value in config.items()}, default=str
            ),
        },
    )
    return file


def load_lora(network: Any, directory: Path) -> nn.Module:
    """A plain network of diffusers with an adapter that `export_lora` wrote, by its own means.

    Raises:
        UserError: where it does not take every tensor of the file, or misses some.
    """
    file = directory / LORA_FILE
    with no_progress_bars():
        network.load_lora_adapter(str(directory), weight_name=LORA_FILE)
    taken = {
        f"{PREFIX}{key}" for key in get_peft_model_state_dict(network, adapter_name="default_0")
    }
    written = set(SafetensorsWeights([file]))
    if taken != written:
        raise UserError(
            f"export: diffusers does not read {file.name} as it was written: missing "
            f"{sorted(taken - written)}, unexpected {sorted(written - taken)}"
        )
    loaded: nn.Module = network.eval()
    return loaded
