"""The state of a worker as tensors and plain numbers, whole or cut into shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fewstep.errors import TrainingError, UserError
from fewstep.parallel.sharding import Sharding
from fewstep.roles.role import STUDENT_EMA, Role, Roles
from fewstep.roles.storage import Storage

MOMENTS = ("exp_avg", "exp_avg_sq")


def state_dict(roles: Roles, sharding: Sharding) -> dict[str, Any]:
    """All that a run needs to go on: tensors of networks and optimizers, and counters.

    Returns:
        "networks" and "optimizers": name -> tensors by key, whole or, of a sharded run,
        DTensors; "counters": plain numbers.
    """
    return {
        "networks": network_tensors(roles.storage, sharding),
        "optimizers": {
            r.name: optimizer_tensors(r, sharding) for r in roles.values() if r.trainable
        },
        "counters": {
            "roles": {
                r.name: {
                    "attempted": r.attempted,
                    "successful": r.successful,
                    "skipped": r.skipped,
                    "skipped_in_a_row": r.skipped_in_a_row,
                }
                for r in roles.values()
            },
            "ema_updates": roles.ema_updates,
        },
    }


def network_tensors(storage: Storage, sharding: Sharding) -> dict[str, dict[str, Tensor]]:
    """Network -> key -> tensor, as a checkpoint saves it."""
    return {
        name: {key: sharding.saved(t, t.detach()) for key, t in tensors.items()}
        for name, tensors in storage.tensors.items()
    }


def empty_state(
    roles: Roles,
    sharding: Sharding,
    optimizers: Mapping[str, Iterable[str]],
    partial: bool = False,
) -> dict[str, Any]:
    """What the tensors of a checkpoint are read into: like `state_dict`, without counters.

    Args:
        roles: of the run.
        sharding: how its networks are spread.
        optimizers: for each trained role the names of its optimizer's saved tensors.
        partial: whether there may be optimizers of other roles, which are not read.

    Raises:
        UserError: where one belongs to no parameter of its role.
    """
    own = {r.name: r for r in roles.values() if r.trainable}
    check_names("optimizers", optimizers, own, partial)
    return {
        "networks": network_tensors(roles.storage, sharding),
        "optimizers": {
            name: {key: empty_entry(own[name], key, sharding) for key in optimizers[name]}
            for name in own
        },
    }


def load_state_dict(
    roles: Roles, sharding: Sharding, state: Mapping[str, Any], partial: bool = False
) -> None:
    """Put back what `state_dict` gave; every key must be there and none be left over.

    Args:
        roles: of the run, or of one group of several.
        sharding: how their networks are spread.
        state: what was saved.
        partial: whether it may hold the state of other roles, networks and adapters too, which is
            passed over; what these roles need must be there all the same.

    Raises:
        UserError: where networks, optimizers, roles or their tensors are missing or left over.
    """
    networks = roles.storage.tensors
    trained = {r.name: r for r in roles.values() if r.trainable}
    check_names("networks", state["networks"], networks, partial)
    check_names("optimizers", state["optimizers"], trained, partial)
    check_names("roles", state["counters"]["roles"], roles, partial)
    for name, tensors in networks.items():
        check_names(f"tensors of network {name}", state["networks"][name], tensors, partial)
        load_tensors(tensors, state["networks"][name], sharding)
    for role in trained.values():
        load_optimizer_tensors(role, state["optimizers"][role.name], sharding)
    load_counters(roles, state["counters"])


def load_counters(roles: Roles, counters: Mapping[str, Any]) -> None:
    """Put back what was counted; `counters`: as in `state_dict`, of other roles as well."""
    for role in roles.values():
        for key, value in counters["roles"][role.name].items():
            setattr(role, key, value)
    # Counted where the average is.
    roles.ema_updates = counters["ema_updates"] if STUDENT_EMA in roles else 0


def check_names(
    what: str, found: Iterable[str], needed: Iterable[str], partial: bool = False
) -> None:
    """Raise UserError unless what was saved is what the run has; `partial`: there may be more."""
    found, needed = set(found), set(needed)
    if partial:
        found &= needed
    if found != needed:
        missing, extra = sorted(needed - found)[:4], sorted(found - needed)[:4]
        raise UserError(
            f"the saved {what} are not those of the run: missing {', '.join(missing) or 'none'}, "
            f"left over {', '.join(extra) or 'none'}"
        )


@torch.no_grad()
def load_tensors(
    tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor], sharding: Sharding
) -> None:
    """Copy what was saved into the tensors of a network."""
    for key, tensor in tensors.items():
        part = sharding.restored(tensor, saved[key])
        (own,), (new,) = sharding.local([tensor]), sharding.local([part])
        if own.shape != new.shape:
            raise UserError(
                f"the saved tensor {key} has shape {tuple(saved[key].shape)}, the network needs "
                f"{tuple(tensor.shape)}"
            )
        own.copy_(new)


def optimizer_tensors(role: Role, sharding: Sharding) -> dict[str, Tensor]:
    """The optimizer's state as tensors named "<parameter>/<entry>"."""
    assert role.optimizer is not None
    state = role.optimizer.state
    counts = [float(state[p]["step"]) if "step" in state[p] else 0.0 for p in role.tensors]
    # A rank that holds no part of a tensor has no state of it; the others have.
    steps = sharding.ranks.gather(torch.tensor(counts)).amax(0)
    found = {}
    for (key, parameter), step in zip(role.parameters.items(), steps, strict=True):
        if step == 0:
            continue
        for entry in MOMENTS:
            part = state[parameter].get(entry)
            if part is None:
                if parameter.numel() > 0:
                    raise TrainingError(
                        f"the optimizer of {role.name} has moments of {key} on some ranks only: "
                        f"not every rank's samples use it"
                    )
                part = parameter.new_empty(0)
            found[f"{key}/{entry}"] = sharding.saved(parameter, part)
        found[f"{key}/step"] = step.clone()
    return found


def empty_entry(role: Role, name: str, sharding: Sharding) -> Tensor:
    """What one saved tensor of a role's optimizer is read into."""
    key, _, entry = name.rpartition("/")
    if key not in role.parameters or entry not in (*MOMENTS, "step"):
        raise UserError(f"the saved optimizer of {role.name} has a tensor {name!r} of no parameter")
    if entry == "step":
        return torch.zeros(())
    parameter = role.parameters[key]
    return sharding.saved(parameter, torch.zeros_like(parameter))


def load_optimizer_tensors(role: Role, tensors: Mapping[str, Tensor], sharding: Sharding) -> None:
    """Put back what `optimizer_tensors` gave.

    Raises:
        UserError: where a tensor belongs to no parameter of the role.
    """
    assert role.optimizer is not None
    role.optimizer.state.clear()
    for name, value in tensors.items():
        key, _, entry = name.rpartition("/")
        if key not in role.parameters:
            raise UserError(
                f"the saved optimizer of {role.name} has a tensor of {key!r}, no parameter"
            )
        parameter = role.parameters[key]
        if entry != "step":
            value = sharding.restored(parameter, value)
        # The step count too: a fused optimizer wants it where the parameter is.
        role.optimizer.state[parameter][entry] = value.to(parameter.device)
