"""Roles: the student, the fake score, the teacher and the averaged student."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from fewstep.errors import TrainingError, UserError
from fewstep.models.block_features import FeatureExtractor, select_blocks
from fewstep.models.model import Denoiser, Model
from fewstep.roles.ema import EMASettings, ema_update
from fewstep.roles.optimizer import OptimizerSettings
from fewstep.roles.storage import Storage

STUDENT = "student"
STUDENT_EMA = "student_ema"
FAKE_SCORE = "fake_score"
TEACHER_SCORE = "teacher_score"
DISCRIMINATOR = "discriminator"
CPU = torch.device("cpu")

Align = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]


@final
@dataclass
class Role:
    """One role: its tensors, its optimizer and what became of its updates.

    Attributes:
        name: what the weights are for.
        storage: "independent" or "shared_base".
        adapter: the adapter's name in shared storage, else None.
        parameters: the tensors it owns, by name.
        settings: its optimizer's settings; None for a frozen role.
        optimizer: None for a frozen role.
        attempted: phases that trained it.
        successful: updates done.
        skipped: updates skipped for non-finite numbers.
        skipped_in_a_row: the latest run of them.
    """

    name: str
    storage: str
    adapter: str | None
    parameters: dict[str, nn.Parameter]
    settings: OptimizerSettings | None = None
    optimizer: torch.optim.Optimizer | None = None
    attempted: int = 0
    successful: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    tensors: list[nn.Parameter] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.tensors = list(self.parameters.values())

    @property
    def trainable(self) -> bool:
        """Whether it has an optimizer."""
        return self.optimizer is not None

    @property
    def parameter_count(self) -> int:
        """Numbers it owns."""
        return sum(p.numel() for p in self.tensors)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update; 0 for a frozen role."""
        if self.settings is None:
            return 0.0
        return self.settings.lr * self.settings.schedule.factor(self.successful)

    def __repr__(self) -> str:
        where = f"adapter {self.adapter!r}" if self.adapter else f"{self.storage} storage"
        optimizer = type(self.optimizer).__name__ if self.optimizer else "frozen"
        return (
            f"{self.name}: {where}, {self.parameter_count:,} parameters, {optimizer}, "
            f"{self.successful} updates, {self.skipped} skipped"
        )


@final
@dataclass(frozen=True)
class Each:
    """Several roles in force at once, each for its own part of a batch.

    Attributes:
        names: the roles, in the order of the parts.
        samples: rows of one part.
    """

    names: tuple[str, ...]
    samples: int

    def __repr__(self) -> str:
        return f"each of {', '.join(self.names)}"


@final
class Roles(Mapping[str, Role]):
    """All roles of a run over one storage; `use` puts one in force, `use_each` several."""

    def __init__(
        self,
        model: Model,
        storage: Storage,
        names: Sequence[str],
        optimizers: Mapping[str, OptimizerSettings],
        ema: EMASettings | None = None,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        align: Align = lambda source, target: (source, target),
    ) -> None:
        """Build roles over networks that exist already.

        Args:
            model: the adapter.
            storage: holds the weights.
            names: the roles.
            optimizers: settings of those that are trained; the others are frozen.
            ema: how student_ema follows the student, where that role exists.
            device: where the networks are.
            dtype: of their weights.
            align: (student's tensors, average's tensors) -> the parts of both that are here,
                where they are not whole.

        Raises:
            UserError: where a trained role owns nothing.
            TrainingError: where two roles own the same tensor.
        """
        self.model = model
        self.storage = storage
        self.ema = ema
        self.ema_updates = 0
        self.device = device
        self.dtype = dtype
        self._align = align
        self._active: str | Each | None = None
        mark_trained(storage, names, optimizers)
        self._roles = {n: self._build_role(n, optimizers.get(n)) for n in names}
        self._check_disjoint()

    def _build_role(self, name: str, settings: OptimizerSettings | None) -> Role:
        parameters = self.storage.parameters(name)
        for parameter in parameters.values():
            if settings is None and name == STUDENT_EMA and parameter.element_size() < 4:
                parameter.data = parameter.data.float()
        role = Role(
            name, self.storage.kind, self.storage.adapter(name), parameters, settings=settings
        )
        if settings is not None:
            if not parameters:
                raise UserError(f"optimizers.{name}: the role {name!r} owns nothing to train")
            role.optimizer = settings.build(p for k, p in parameters.items() if settings.trains(k))
        return role

    def _check_disjoint(self) -> None:
        owner: dict[int, str] = {}
        for role in self._roles.values():
            for key, parameter in role.parameters.items():
                other = owner.setdefault(id(parameter), role.name)
                if other != role.name:
                    raise TrainingError(f"{other} and {role.name} both own {key!r}")

    def __getitem__(self, name: str) -> Role:
        return self._roles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._roles.values()))

    @contextmanager
    def use(self, name: str) -> Iterator[Denoiser]:
        """Put a role in force for the block, and the previous one again after it. Nests.

        Gradients are disabled for a frozen role, whatever the caller asks. The network runs in
        eval mode: no dropout from a global generator. A role that is no denoiser is put in force
        like any other, but to call it as one is an error.
        """
        with self._in_force(name, self.storage.module(name), self._roles[name].trainable) as one:
            yield one

    @contextmanager
    def use_features(
        self, name: str, blocks: Sequence[str] | None, in_training: bool = False
    ) -> Iterator[FeatureExtractor]:
        """Put a role in force for the block, to look at what blocks of its network give. Nests.

        Where the caller has gradients enabled, they reach the network's input, of a frozen role
        too. Without `in_training`, take them by `torch.autograd.grad`, for that input alone, within
        the block.

        Args:
            name: the role.
            blocks: names of blocks; None: the one in the middle.
            in_training: whether a backward pass to the role's parameters follows, as after `use`.

        Raises:
            UserError: for a block that does not exist.
        """
        network = self.storage.networks[self.storage.network_of(name)]
        chosen = select_blocks(self.model, network, blocks)
        module = self.storage.module(name, in_training)
        with self._in_force(name, module, gradients=True) as denoiser:
            yield FeatureExtractor(denoiser, chosen)

    def head(self, name: str, in_training: bool) -> nn.Module:
        """A network that is no denoiser, ready to call.

        Args:
            name: of the network, whichever role its weights belong to.
            in_training: whether a backward pass to its parameters follows.
        """
        return self.storage.module(name, in_training)

    @contextmanager
    def use_each(self, names: Sequence[str], samples: int) -> Iterator[Denoiser]:
        """Put several roles in force for the block, each for its own part of one batch.

        The denoiser's batches hold `samples` rows for every name, in the order of the names. It
        never records gradients. A sharded base is gathered once for all of them. Nests, as `use`
        does, and in it.

        Raises:
            ValueError: where the roles have networks of their own.
        """
        each = Each(tuple(names), samples)
        with self._in_force(each, self.storage.module(names[0]), gradients=False) as denoiser:
            yield denoiser

    @contextmanager
    def _in_force(
        self, active: str | Each, network: nn.Module, gradients: bool
    ) -> Iterator[Denoiser]:
        previous = self._active
        # A network is in eval mode unless its owner has put it into train mode.
        modes = [(m, m.training) for m in network.modules()] if network.training else []
        if modes:
            network.eval()
        try:
            self._activate(active)
            with torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
                yield Denoiser(
                    self.model,
                    network,
                    lambda: self._check_active(active),
                    lambda: self._check_backward(active),
                )
        finally:
            self._activate(previous)
            for module, training in modes:
                module.training = training

    def _activate(self, active: str | Each | None) -> None:
        self._active = active
        if isinstance(active, Each):
            self.storage.activate_each(active.names, active.samples)
        else:
            self.storage.activate(active)

    def _check_active(self, called: str | Each) -> None:
        if called in self.storage.heads:
            raise UserError(f"the role {called!r} makes no samples: it tells real from made ones")
        if self._active != called:
            raise TrainingError(
                f"the network was called as {called!r} while {self._active or 'no role'} was in "
                f"use: call it inside its own `with roles.use...` block, and not in one within"
            )
        if isinstance(called, Each) and torch.is_grad_enabled():
            raise TrainingError(f"the network was called as {called!r} with gradients enabled")

    def _check_backward(self, called: str | Each) -> None:
        if self._active not in (None, called):
            raise TrainingError(
                f"the backward pass of {called} was run while {self._active} was in use: run it "
                f"inside `with roles.use({called!r})`"
            )

    def check_gradients(self, active: str, zeros_for_none: bool = False) -> None:
        """After the backward passes: only the active role has gradients, and all of it has.

        Args:
            active: the role that was trained.
            zeros_for_none: whether a gradient of zeros stands for none (where tensors of several
                roles lie in one row, all of the row gets one). A role without any gradient then
                shows in a norm of zero.

        Raises:
            TrainingError: naming roles and tensors.
        """
        for role in self._roles.values():
            leaked = {} if role.name == active else gradients_of(role)
            if zeros_for_none and leaked:
                norms = torch.stack(torch._foreach_norm(list(leaked.values())))
                found = [bool(n) for n in (norms != 0).tolist()]
                leaked = dict(
                    pair for pair, some in zip(leaked.items(), found, strict=True) if some
                )
            if leaked:
                raise TrainingError(
                    f"the backward pass of {active} gave gradients to {role.name}: "
                    f"{_some(list(leaked))}; was it run while {role.name} was in use?"
                )
        role = self._roles[active]
        # A rank that holds no part of a tensor has no gradient of it either.
        missing = [k for k, p in role.parameters.items() if p.grad is None and p.numel() > 0]
        missing = [k for k in missing if role.settings is None or role.settings.trains(k)]
        if missing:
            raise TrainingError(
                f"the backward pass of {active} gave no gradient to {len(missing)} of its "
                f"{len(role.tensors)} tensors: {_some(missing)}; was it run under another role? "
                f"Tensors that the network never uses go into "
                f"optimizers.{active}.unused_parameters"
            )

    def update_ema(self) -> None:
        """Let student_ema follow, once the student's successful updates reach `ema.start`."""
        if self.ema is None or STUDENT_EMA not in self._roles:
            return
        student = self._roles[STUDENT]
        if student.successful < self.ema.start:
            return
        current, average = self._align(student.tensors, self._roles[STUDENT_EMA].tensors)
        ema_update(average, current, self.ema.decay)
        self.ema_updates += 1


def mark_trained(
    storage: Storage, names: Iterable[str], optimizers: Mapping[str, OptimizerSettings]
) -> None:
    """Let gradients be computed for the parameters that are trained, and for no others.

    Sharding must know it: it is called before the networks are spread, too.

    Raises:
        UserError: where `unused_parameters` names what does not exist.
    """
    for name in names:
        settings, parameters = optimizers.get(name), storage.parameters(name)
        for key, parameter in parameters.items():
            parameter.requires_grad_(settings is not None and settings.trains(key))
        for part in settings.unused_parameters if settings is not None else ():
            if not any(part in key for key in parameters):
                raise UserError(
                    f"optimizers.{name}.unused_parameters: {part!r} is part of no name of a "
                    f"parameter; there are {_some(list(parameters))}"
                )


def gradients_of(role: Role) -> dict[str, Tensor]:
    """The role's gradients that exist, by the names of its tensors."""
    return {k: p.grad for k, p in role.parameters.items() if p.grad is not None}


def _some(names: Sequence[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
