"""Your own network: any `torch.nn.Module` called as `network(x, sigma, **condition)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Literal, final

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fewstep.diffusion.paths import Path, RectifiedFlow
from fewstep.diffusion.prediction import PredictionKind
from fewstep.errors import UserError
from fewstep.files import permit_as_usual
from fewstep.models.files import check_safetensors
from fewstep.models.model import Condition, Model
from fewstep.settings import Settings


@final
class ModuleSettings(Settings):
    """A model that is passed in from Python: `fewstep.train(recipe, model=ModuleModel(...))`."""

    family: Literal["module"] = "module"
    weights: str | None = Field(None, description="a run directory to start from")

    def build(self) -> Model:
        """Not possible from a recipe alone."""
        raise UserError(
            "model.family: 'module' is a network given from Python: pass it there, as in "
            "fewstep.train(recipe, model=fewstep.ModuleModel(...)) or "
            "fewstep.open_run(run, model=...)"
        )


@final
class ModuleModel(Model):
    """Adapter for a plain module.

    The network is called as `network(x, timestep, **condition)`, where timestep is
    `path.timestep(sigma)`, float [B] (sigma itself by default), and condition holds
    `class_labels` (int64 [B]) if `classes` is given. With `null_label`, that label stands for
    "no class", which makes guidance possible.
    """

    def __init__(
        self,
        make_network: Callable[[], nn.Module],
        sample_shape: tuple[int, ...],
        *,
        classes: int | None = None,
        null_label: int | None = None,
        prediction: PredictionKind = "velocity",
        path: Path | None = None,
        guidance_distilled: bool = False,
    ) -> None:
        """`make_network`: builds the network with fresh weights."""
        self.make_network = make_network
        self.sample_shape = sample_shape
        self.classes = classes
        self.null_label = null_label
        self.supports_guidance = null_label is not None
        self.prediction = prediction
        self.path = path if path is not None else RectifiedFlow(timestep_scale=1.0)
        self.guidance_distilled = guidance_distilled

    def build_network(self) -> nn.Module:
        """A new network in eval mode."""
        return self.make_network().eval()

    def load_network(self, directory: FilePath) -> nn.Module:
        """Weights from `directory/model.safetensors`."""
        file = directory / "model.safetensors"
        check_safetensors(file)
        network = self.build_network()
        try:
            network.load_state_dict(load_file(file))
        except RuntimeError as error:
            raise UserError(f"{file} does not fit the network: {error}") from error
        return network

    def save_network(self, network: nn.Module, directory: FilePath) -> None:
        """Write `directory/model.safetensors`."""
        directory.mkdir(parents=True, exist_ok=True)
        state = {key: value.contiguous() for key, value in network.state_dict().items()}
        save_file(state, directory / "model.safetensors")
        permit_as_usual([directory / "model.safetensors"])

    def forward(self, network: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """See `Model.forward`."""
        output: Tensor = network(x, self.path.timestep(sigma), **condition)
        return output

    def unconditional(self, condition: Condition) -> Condition:
        """The null label for every sample, where the network has one."""
        if self.null_label is None:
            return super().unconditional(condition)
        labels = condition["class_labels"]
        return {**condition, "class_labels": torch.full_like(labels, self.null_label)}
