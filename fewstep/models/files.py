"""Reading networks that diffusers wrote, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from fewstep.errors import UserError


def read_network_config(directory: Path, class_name: str) -> dict[str, Any]:
    """The keyword arguments of a network that diffusers saved.

    Args:
        directory: holds config.json.
        class_name: the diffusers class that it must name.

    Raises:
        UserError: where there is none, it is not JSON, or it names another class.
    """
    file = directory / "config.json"
    if not directory.is_dir():
        raise UserError(f"model.weights: {directory} is not a directory")
    if not file.is_file():
        raise UserError(
            f"model.weights: {directory} is neither a run directory (no checkpoint in it) nor a "
            f"network saved by diffusers (no config.json)"
        )
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} does not hold a JSON object")
    found = config.get("_class_name")
    if found != class_name:
        raise UserError(f"{file} describes a {found}, where a {class_name} is needed")
    return {key: value for key, value in config.items() if not key.startswith("_")}


def load_diffusers_network(network_class: Any, directory: Path) -> nn.Module:
    """A network in eval mode, every key of its weights accounted for.

    Raises:
        UserError: where a file is missing, truncated, or its keys or shapes do not fit.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no .safetensors weights")
    for file in files:
        check_safetensors(file)
    try:
        network, info = network_class.from_pretrained(
            directory, output_loading_info=True, low_cpu_mem_usage=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the weights in {directory} cannot be loaded: {error}") from error
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise UserError(f"the weights in {directory} do not fit their config.json: {wrong}")
    loaded: nn.Module = network.eval()
    return loaded


def check_safetensors(file: Path) -> None:
    """Raise UserError unless the file is a whole safetensors file (header and length agree)."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is corrupt or truncated: {error}") from error
