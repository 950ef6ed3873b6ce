"""Where the roles' weights live: each with a network of its own, or as adapters on one base."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fewstep.errors import UserError
from fewstep.models.model import Model
from fewstep.settings import Settings

if TYPE_CHECKING:  # it takes seconds to import, and recipes are checked without it
    from peft import LoraConfig
    from peft.tuners.lora.layer import LoraLayer

StorageKind = Literal["independent", "shared_base"]
ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


@final
class LoraSettings(Settings):
    """Low-rank adapters (Hu et al., arXiv 2106.09685) for `storage: shared_base`."""

    rank: Annotated[int, Field(gt=0)] = Field(16, description="of each adapter")
    alpha: Annotated[float, Field(gt=0)] = Field(16.0, description="scale is alpha / rank")
    targets: tuple[str, ...] | None = Field(
        None,
        description="names of the modules to adapt, or their last parts; "
        "null takes the model family's own list",
    )


class Storage(ABC):
    """The physical networks and which role's weights are in force."""

    kind: StorageKind
    networks: dict[str, nn.Module]
    """Each physical network once, by name."""
    tensors: dict[str, dict[str, Tensor]]
    """What each network holds: parameters and persistent buffers, by name."""
    heads: dict[str, str]
    """Networks that are no denoisers, by name: the role whose weights they hold."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        """`networks`: name -> network, each a module of its own."""
        self.networks = dict(networks)
        self.tensors = {}
        self.heads = {}
        self._wrapped: dict[str, nn.Module] = {}
        self._in_training: dict[str, nn.Module] = {}
        for name, network in self.networks.items():
            self.bind(name, network.state_dict(keep_vars=True))

    def bind(self, network: str, tensors: Mapping[str, Tensor]) -> None:
        """Say which tensors a network holds now, where its own have been replaced by others."""
        self.tensors[network] = dict(tensors)

    def add_head(self, name: str, network: nn.Module, role: str) -> None:
        """Add a network that is no denoiser.

        Args:
            name: of the network.
            network: plain, not in `networks` yet.
            role: whose weights it holds: one of its own, of the same name, or a denoiser's.
        """
        self.heads[name] = role
        self.networks[name] = network
        self.bind(name, network.state_dict(keep_vars=True))

    def wrap(self, called: str, module: nn.Module, only_in_training: bool = False) -> None:
        """Let a role's network, or a head, be called through another module, in eval mode.

        `only_in_training`: where gradients of its parameters may be wanted, and not else.
        """
        wrapped = self._in_training if only_in_training else self._wrapped
        wrapped[called] = module.eval()

    def module(self, called: str, in_training: bool = True) -> nn.Module:
        """The module to call for a role, or for a head.

        `in_training`: whether a backward pass to its parameters may follow.
        """
        found = self._in_training.get(called) if in_training else None
        return found or self._wrapped.get(called) or self.networks[self.network_of(called)]

    def called_for(self, role: str) -> tuple[str, ...]:
        """What `module` knows of a role: itself, and the heads that hold weights of it."""
        return (role, *(head for head, of in self.heads.items() if of == role != head))

    @abstractmethod
    def network_of(self, called: str) -> str:
        """Name of the network that is called for a role, or of a head: its own."""

    @abstractmethod
    def _parameters_in_network(self, role: str) -> dict[str, nn.Parameter]:
        """Those of `parameters` that are in the role's own network."""

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """The tensors that belong to the role alone, by name; those of its heads follow."""
        found = self._parameters_in_network(role)
        for head in self.called_for(role)[1:]:
            for key, parameter in self._all_parameters(head).items():
                # No module has an empty name: no parameter of the network itself is called so.
                found[f"{head}..{key}"] = parameter
        return found

    def _all_parameters(self, network: str) -> dict[str, nn.Parameter]:
        """All of a network's parameters; one that has several names goes by its first."""
        tensors, first = self.tensors[network], dict[int, str]()
        for key, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                first.setdefault(id(tensor), key)
        return {key: cast(nn.Parameter, tensors[key]) for key in first.values()}

    @abstractmethod
    def source_key(self, key: str) -> str:
        """The name that one of `tensors` has in the plain network's own weights."""

    @abstractmethod
    def adapter(self, role: str) -> str | None:
        """Name of the role's adapter, or None."""

    @abstractmethod
    def plain_network(self, role: str) -> nn.Module:
        """A copy of the role's network that needs none of our code: adapters are merged."""

    @abstractmethod
    def activate(self, role: str | None) -> None:
        """Put a role's weights in force; None: the bare base."""

    @abstractmethod
    def activate_each(self, roles: Sequence[str], samples: int) -> None:
        """Put several roles in force, each for its own `samples` rows of a batch, in this order.

        For passes without gradients. Lasts until `activate` or another `activate_each`.
        """


@final
class Independent(Storage):
    """A network for every role."""

    kind: StorageKind = "independent"

    def network_of(self, called: str) -> str:
        """The role's own, or the head."""
        return called

    def _parameters_in_network(self, role: str) -> dict[str, nn.Parameter]:
        """All of the network's."""
        return self._all_parameters(role)

    def source_key(self, key: str) -> str:
        """The same name."""
        return key

    def adapter(self, role: str) -> str | None:
        """None: there are no adapters."""
        return None

    def plain_network(self, role: str) -> nn.Module:
        """A copy of the role's network."""
        return copy.deepcopy(self.networks[role])

    def activate(self, role: str | None) -> None:
        """Nothing to switch."""

    def activate_each(self, roles: Sequence[str], samples: int) -> NoReturn:
        """Impossible: no module holds several roles' weights."""
        raise ValueError("roles with networks of their own cannot share a network call")


@final
class SharedBase(Storage):
    """One frozen base; every role but the teacher is a LoRA adapter on it.

    Switching sets the adapters' layers directly: PEFT's `set_adapter` would flip
    `requires_grad`, and a backward pass after that finds no parameter to give a gradient to.
    """

    kind: StorageKind = "shared_base"
    base_role = "teacher_score"

    def __init__(self, base: nn.Module, adapters: Sequence[str], lora: LoraConfig) -> None:
        """Inject one adapter a role into `base`, all starting as copies of the first."""
        from peft import inject_adapter_in_model
        from peft.tuners.lora.layer import LoraLayer

        self.adapters = tuple(adapters)
        base.requires_grad_(False)
        frozen = {id(p) for p in base.parameters()}
        with warnings.catch_warnings(), standing_in(base):
            # Several adapters on one network are what this class is for.
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            for name in self.adapters:
                inject_adapter_in_model(lora, base, adapter_name=name)
        super().__init__({"base": base})
        self._layers = {n: m for n, m in base.named_modules() if isinstance(m, LoraLayer)}
        self._hooks: list[RemovableHandle] = []
        self._keys: dict[str, list[str]] = {name: [] for name in (*self.adapters, self.base_role)}
        for key, parameter in base.named_parameters():
            owner = self.base_role if id(parameter) in frozen else adapter_of(key)
            self._keys[owner].append(key)
        first = self.parameters(self.adapters[0]).values()
        for name in self.adapters:
            with torch.no_grad():
                for parameter, source in zip(self.parameters(name).values(), first, strict=True):
                    parameter.copy_(source)
                    parameter.requires_grad_(True)
        self.activate(None)

    def network_of(self, called: str) -> str:
        """The base, whatever the role, but for a head."""
        return called if called in self.heads else "base"

    def _parameters_in_network(self, role: str) -> dict[str, nn.Parameter]:
        """The role's adapter tensors; the base's own for the teacher; a head's own."""
        if role in self.heads:
            return self._all_parameters(role)
        return {key: cast(nn.Parameter, self.tensors["base"][key]) for key in self._keys[role]}

    def source_key(self, key: str) -> str:
        """The name without what PEFT adds to that of an adapted module."""
        return key.replace(".base_layer.", ".")

    def adapter(self, role: str) -> str | None:
        """The role's own name; None for the base."""
        return role if role in self.adapters else None

    def plain_network(self, role: str) -> nn.Module:
        """A copy of the base with the role's adapter merged into it."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        network = copy.deepcopy(self.networks["base"])
        adapter = self.adapter(role)
        layers = [(n, m) for n, m in network.named_modules() if isinstance(m, BaseTunerLayer)]
        for name, layer in layers:
            if adapter is not None:
                layer.merge(adapter_names=[adapter])
            network.set_submodule(name, layer.get_base_layer())
        # What PEFT leaves on a network would make others take it for an adapted one.
        network.__dict__.pop("peft_config", None)
        return network.requires_grad_(False)

    def activate(self, role: str | None) -> None:
        """Switch every adapted layer; no parameter is touched."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        adapter = self.adapter(role) if role is not None else None
        active = [adapter] if adapter is not None else []
        for layer in self._layers.values():
            # Straight into the instance: nn.Module's attribute setter costs ten times as much.
            layer.__dict__["_active_adapter"] = active
            layer.__dict__["_disable_adapters"] = adapter is None

    def activate_each(self, roles: Sequence[str], samples: int) -> None:
        """The bare base, and hooks that add to every part of the batch what its adapter says.

        PEFT's own batches of several adapters pick rows by lists of indices, which are copied to
        the device in every layer; parts that lie one after another are mere slices.
        """
        self.activate(None)
        parts = [
            (slice(index * samples, (index + 1) * samples), adapter)
            for index, adapter in enumerate(map(self.adapter, roles))
            if adapter is not None
        ]
        rows = len(roles) * samples
        for name, layer in self._layers.items():
            hook = partial(add_adapters, name, rows, parts)
            # First of all: after the hook of a layer that is sharded alone, its weights are gone.
            self._hooks.append(cast(nn.Module, layer).register_forward_hook(hook, prepend=True))


def add_adapters(
    name: str,
    rows: int,
    parts: Sequence[tuple[slice, str]],
    layer: nn.Module,
    args: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    """Forward hook of a layer whose adapters are off: add each part's own, in place.

    Args:
        name: of the layer, for messages.
        rows: of the whole batch.
        parts: rows and their adapter.
        layer: the adapted layer.
        args: its input [rows, ...].
        output: that of its base [rows, ...].

    Raises:
        UserError: where the input has another number of rows: what they belong to is unknown.
    """
    x = args[0]
    if len(x) != rows:
        raise UserError(
            f"method.score_batching: 'fused' needs every adapted layer to see one row for each of "
            f"the {rows} samples, but {name!r} is given {list(x.shape)}; leave it out of "
            f"lora.targets, or use 'separate'"
        )
    for part, adapter in parts:
        output[part].add_(adapter_term(cast("LoraLayer", layer), adapter, x[part]))


def adapter_term(layer: LoraLayer, adapter: str, x: Tensor) -> Tensor:
    """What an adapter adds to the output of its layer: scale * B A x."""
    scale = layer.scaling[adapter]
    if adapter in layer.lora_embedding_A:
        rows = nn.functional.embedding(x, layer.lora_embedding_A[adapter].T)
        term: Tensor = rows @ layer.lora_embedding_B[adapter].T * scale
    else:
        down, up = layer.lora_A[adapter], layer.lora_B[adapter]
        term = up(down(x.to(down.weight.dtype))) * scale
    return term


@contextmanager
def standing_in(network: nn.Module) -> Iterator[None]:
    """Let weights on the meta device pass for real ones, without memory for them.

    PEFT puts an adapter where its layer's weights are, and on the meta device it would lose the
    values it has just been given.
    """
    places = [
        (module, name, parameter)
        for module in network.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, name, parameter in places:
        hollow = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = nn.Parameter(hollow, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def adapter_of(key: str) -> str:
    """The adapter that a LoRA tensor belongs to: `....to_q.lora_A.student.weight` -> student.

    The last such part counts: the network's own modules may be named like a role.
    """
    parts = key.split(".")
    kind = max(i for i, part in enumerate(parts) if part.startswith("lora_"))
    return parts[kind + 1]


def check_targets(network: nn.Module, targets: Sequence[str]) -> None:
    """Raise UserError unless every LoRA target matches some module that can be adapted."""
    names = [n for n, m in network.named_modules() if isinstance(m, ADAPTABLE)]
    unmatched = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    if unmatched or not targets:
        leaves = sorted({".".join(n.split(".")[-2:]) for n in names})
        raise UserError(
            f"lora.targets: {', '.join(map(repr, unmatched)) or 'the empty list'} matches no "
            f"module of the network; names that exist end in: {', '.join(leaves[:12])}"
        )


def build_shared_base(
    model: Model, base: nn.Module, adapters: Sequence[str], settings: LoraSettings
) -> SharedBase:
    """Adapters on a frozen base. The adapters' first weights come from the global generator.

    Raises:
        UserError: where a target matches nothing, naming it.
    """
    from peft import LoraConfig

    targets = settings.targets if settings.targets is not None else model.lora_targets
    check_targets(base, targets)
    lora = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(targets))
    try:
        return SharedBase(base, adapters, lora)
    except ValueError as error:
        # PEFT refuses targets that also match modules it cannot adapt.
        raise UserError(f"lora.targets: {list(targets)}: {error}") from error


def build_independent(model: Model, teacher: nn.Module, roles: Sequence[str]) -> Independent:
    """The teacher itself, and for every other role a network that starts as the student does."""
    networks = {"teacher_score": teacher} if "teacher_score" in roles else {}
    student = model.student_network(teacher)
    for role in roles:
        if role != "teacher_score":
            network = model.student_network(teacher)
            network.load_state_dict(student.state_dict())
            networks[role] = network
    return Independent(networks)
