"""Reading networks that diffusers wrote, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fewstep.diffusion.timesteps import shift_of_grid
from fewstep.errors import UserError
from fewstep.models.model import Pretrained, empty_network
from fewstep.settings import Settings

Checked = TypeVar("Checked", bound=Settings)
WEIGHTS = "diffusion_pytorch_model.safetensors"


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
    config = read_config(file, class_name)
    return {key: value for key, value in config.items() if not key.startswith("_")}


def read_config(file: Path, class_name: str | None = None) -> dict[str, Any]:
    """What a configuration file of diffusers or transformers says.

    Args:
        file: a JSON object.
        class_name: the class that it must name; None: any.

    Raises:
        UserError: where there is none, it is not JSON, or it names another class.
    """
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{file} does not exist") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} does not hold a JSON object")
    found = config.get("_class_name")
    if class_name not in (None, found):
        raise UserError(f"{file} describes a {found}, where a {class_name} is needed")
    return config


def exported_shift(directory: Path) -> float | None:
    """Shift of the grid that an export of Fewstep is sampled on; None for any other directory.

    The scheduler of an export has none: it is given the sigmas themselves.

    Raises:
        UserError: where the sigmas are no shifted grid.
    """
    index = directory / "model_index.json"
    sigmas = read_config(index).get("sigmas") if index.is_file() else None
    if not sigmas:
        return None
    shift = shift_of_grid(sigmas)
    if shift is None:
        raise UserError(
            f"the shift of the grid is not given, and {directory} is sampled on {sigmas}, which no "
            f"shift makes; give it in the recipe"
        )
    return shift


def settings_from(kind: type[Checked], values: Mapping[str, Any], file: Path) -> Checked:
    """Settings from what a JSON file says; raises UserError with all that is wrong with it."""
    try:
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))} {e['msg']}" for e in error.errors()]
        raise UserError(f"{file}: {'; '.join(p.strip() for p in problems)}") from error


@final
class SafetensorsWeights(Mapping[str, Tensor]):
    """The tensors of some safetensors files, each read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        """`files`: whole safetensors files; a later one wins.

        Raises:
            UserError: naming the file that is corrupt or truncated.
        """
        self._where: dict[str, Path] = {}
        for file in files:
            check_safetensors(file)
            with safe_open(file, framework="pt") as opened:
                self._where |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, key: str) -> Tensor:
        with safe_open(self._where[key], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def weight_files(directory: Path) -> list[Path]:
    """The files that a network's weights are in.

    Those that an index names, where they are in several; else the one of the usual name, whatever
    other precisions lie beside it; else all that there are.

    Raises:
        UserError: where there are none, or one that the index names is missing.
    """
    index = directory / f"{WEIGHTS}.index.json"
    if index.is_file():
        where = read_config(index).get("weight_map", {})
        files = [directory / name for name in sorted(set(where.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise UserError(f"{index} names files that are not there: {missing}")
        return files
    usual = directory / WEIGHTS
    files = [usual] if usual.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no .safetensors weights")
    return files


def load_diffusers_network(network_class: Any, directory: Path) -> nn.Module:
    """A network in eval mode, every key of its weights accounted for.

    Raises:
        UserError: where a file is missing, truncated, or its keys or shapes do not fit.
    """
    for file in weight_files(directory):
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


def open_diffusers_network(make_network: Callable[[], nn.Module], directory: Path) -> Pretrained:
    """The structure of a network that diffusers wrote, and its weights, read when asked for.

    Raises:
        UserError: where a file is missing, truncated, or its keys do not fit.
    """
    weights = SafetensorsWeights(weight_files(directory))
    network = empty_network(make_network)
    state = network.state_dict()
    missing, extra = sorted(state.keys() - weights.keys()), sorted(weights.keys() - state.keys())
    if missing or extra:
        raise UserError(
            f"the weights in {directory} do not fit their config.json: missing {missing}, "
            f"unexpected {extra}"
        )
    for key, tensor in state.items():
        if not tensor.is_meta:
            tensor.copy_(weights[key])
    return Pretrained(network, weights)


def load_opened_network(opened: Pretrained, directory: Path) -> nn.Module:
    """A network with its weights in memory, in eval mode and in float32, whatever they are in.

    Args:
        opened: see `open_diffusers_network`.
        directory: that it was opened from, for messages.

    Raises:
        UserError: where shapes do not fit.
    """
    try:
        opened.network.load_state_dict(dict(opened.weights), assign=True)
    except RuntimeError as error:
        raise UserError(
            f"the weights in {directory} do not fit their config.json: {error}"
        ) from error
    return opened.network.float().eval()


def check_safetensors(file: Path) -> None:
    """Raise UserError unless the file is a whole safetensors file (header and length agree)."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is corrupt or truncated: {error}") from error
