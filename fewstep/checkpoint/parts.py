"""One checkpoint of several groups: who writes which tensor, and whether all of it was read.

Each group holds some of the roles, in processes of its own; a driver, which holds nothing, tells
them what to write and publishes it. Everything here is plain names and numbers: only they travel
between a group and the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fewstep.checkpoint.manifest import read_state
from fewstep.checkpoint.tensors import SECTIONS, TENSORS, flatten, saved_tensors
from fewstep.errors import TrainingError, UserError


def tensor_paths(state: Mapping[str, Any]) -> list[str]:
    """The tensors of a state by "<section>/<name>/<key>", as a checkpoint knows them."""
    return list(flatten(state))


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without its tensors: plain data, and in "tensors" the names in each section."""
    plain = {key: value for key, value in state.items() if key not in SECTIONS}
    return {**plain, "tensors": {section: list(state[section]) for section in SECTIONS}}


def divide(paths_by_group: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Which of its tensors each group writes: the first that holds a tensor does, no other."""
    taken: set[str] = set()
    shares: dict[str, list[str]] = {}
    for group, paths in paths_by_group.items():
        shares[group] = [path for path in paths if path not in taken]
        taken.update(paths)
    return shares


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `plain_state` of a run, of those of its groups in declared order.

    Args:
        states: each with "counters" (see `training.state`) and "tensors"; whatever else is in
            them must be the same in all.

    Returns:
        In the same form: roles and names in order of first appearance. The EMA's updates are those
        of the group that holds it; the others have counted none.

    Raises:
        TrainingError: where two groups hold the same role, or differ in what they should agree on.
    """
    merged: dict[str, Any] = {}
    roles: dict[str, Any] = {}
    for state in states:
        counters = state["counters"]
        if twice := sorted(set(roles) & set(counters["roles"])):
            raise TrainingError(f"two groups have counted the updates of {', '.join(twice)}")
        roles.update(counters["roles"])
        for key, value in state.items():
            if key not in ("counters", "tensors") and merged.setdefault(key, value) != value:
                raise TrainingError(f"groups differ in {key}: {merged[key]!r} and {value!r}")
    return {
        **merged,
        "counters": {
            "roles": roles,
            "ema_updates": max(state["counters"]["ema_updates"] for state in states),
        },
        "tensors": {
            section: list(dict.fromkeys(n for s in states for n in s["tensors"][section]))
            for section in SECTIONS
        },
    }


def unread(checkpoint: Path, state: Mapping[str, Any]) -> list[str]:
    """What a checkpoint holds and a group, which has loaded it with `partial`, does not.

    Args:
        checkpoint: that was loaded.
        state: what the group holds now, as `training.state.state_dict` gives it.

    Returns:
        Names like "networks/student", "optimizers/student" and "roles/student", and those of
        single tensors, "networks/student/proj.weight".

    Raises:
        UserError: where the checkpoint is damaged.
    """
    saved = [*_names(read_state(checkpoint)), *saved_tensors(checkpoint / TENSORS)]
    own = {*_names(plain_state(state)), *tensor_paths(state)}
    return [name for name in saved if name not in own]


def _names(plain: Mapping[str, Any]) -> list[str]:
    owners = [f"{section}/{name}" for section in SECTIONS for name in plain["tensors"][section]]
    return [*owners, *(f"roles/{role}" for role in plain.get("counters", {}).get("roles", {}))]


def check_all_read(unread_by_group: Mapping[str, Collection[str]]) -> None:
    """Raise UserError where a checkpoint holds something that no group has read (see `unread`)."""
    if not unread_by_group:
        return
    first, *others = unread_by_group.values()
    left = [name for name in first if all(name in other for other in others)]
    # Not each tensor of a network that nobody has read: its name says it.
    owners = {name for name in left if name.count("/") == 1}
    names = [n for n in left if n in owners or "/".join(n.split("/", 2)[:2]) not in owners]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UserError(
            f"the checkpoint holds what no group ({', '.join(unread_by_group)}) has: "
            f"{', '.join(names[:8])}{more}. Each role that was saved must be in one of "
            f"placement.groups"
        )
