"""Trainer groups: which roles live in the same processes, and whether a method can be run so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fewstep.errors import UserError
from fewstep.methods.method import Method
from fewstep.roles.role import STUDENT, STUDENT_EMA
from fewstep.training.cycle import CycleSettings

Groups = Mapping[str, tuple[str, ...]]
"""Group -> its roles, in the order in which the groups train."""
ROLLOUT, REWARD, DRIVER = "rollout", "reward", "driver"
"""What the other processes of a run are called."""


def group_of(groups: Groups, role: str) -> str:
    """The group in which a role lives; raises KeyError for one that is in none."""
    for group, members in groups.items():
        if role in members:
            return group
    raise KeyError(role)


def scoring_group(groups: Groups, method: Method, role: str) -> str | None:
    """The other group that scores the samples of a role's phases; None: its own, or nobody."""
    scorers = method.scored_by.get(role, ())
    home = group_of(groups, role)
    elsewhere = {group_of(groups, scorer) for scorer in scorers} - {home}
    return elsewhere.pop() if elsewhere else None


def write_groups(groups: Groups) -> str:
    """Groups as a recipe has them, e.g. "{critic: [fake_score], actor: [student]}"."""
    return "{" + ", ".join(f"{g}: [{', '.join(roles)}]" for g, roles in groups.items()) + "}"


def check_groups(
    groups: Groups, roles: Sequence[str], method: Method, cycle: CycleSettings
) -> None:
    """Raise UserError where a run's phases cannot be run by these groups.

    Args:
        groups: the trainer groups, in the order in which they train.
        roles: all of the run's.
        method: which roles are trained, and which score the samples of others.
        cycle: the order of the phases.
    """
    _check_names(groups)
    _check_members(groups, roles)
    _check_use(groups, method)
    for role in method.trained_roles:
        _check_scorers(groups, method, role)
    for role in method.followers:
        _check_order(groups, role, method.followers[0], cycle)


def _check_names(groups: Groups) -> None:
    if not groups:
        raise UserError("placement.groups: is empty; name groups, or give null for one of all")
    for group, members in groups.items():
        if re.fullmatch(r"[A-Za-z0-9_-]+", group) is None:
            raise UserError(
                f"placement.groups: {group!r} is no name of a group; it may have letters, digits, "
                f"_ and -"
            )
        if group in (ROLLOUT, REWARD, DRIVER):
            raise UserError(
                f"placement.groups: {group!r} is what other processes of the run are called; "
                f"choose another name for that group"
            )
        if not members:
            raise UserError(
                f"placement.groups: {group!r} has no roles; give it some, or leave it out"
            )


def _check_members(groups: Groups, roles: Sequence[str]) -> None:
    """Every role of the run in one group, and nothing else."""
    homes: dict[str, str] = {}
    for group, members in groups.items():
        for role in members:
            if role not in roles:
                raise UserError(
                    f"placement.groups: {role!r} (in {group!r}) is no role of this run; its roles "
                    f"are {', '.join(roles)}"
                )
            if role in homes:
                places = f"{homes[role]!r} and {group!r}"
                twice = f"in {group!r} twice" if homes[role] == group else f"in {places}"
                raise UserError(
                    f"placement.groups: {role} is {twice}; a role lives in one group, once"
                )
            homes[role] = group
    missing = [role for role in roles if role not in homes]
    if missing:
        raise UserError(
            f"placement.groups: {' and '.join(missing)} {'are' if missing[1:] else 'is'} in no "
            f"group; every role of the run lives in one of {', '.join(map(repr, groups))}"
        )
    if STUDENT_EMA in homes and homes[STUDENT_EMA] != homes[STUDENT]:
        raise UserError(
            f"placement.groups: student_ema is in {homes[STUDENT_EMA]!r} and the student in "
            f"{homes[STUDENT]!r}; the average is made where the student is trained, so put "
            f"student_ema into {homes[STUDENT]!r}"
        )


def _check_use(groups: Groups, method: Method) -> None:
    """Every group trains or scores something."""
    useful = {*method.trained_roles, *(s for scorers in method.scored_by.values() for s in scorers)}
    for group, members in groups.items():
        if useful.isdisjoint(members):
            raise UserError(
                f"placement.groups: {group!r} ({', '.join(members)}) trains nothing and scores "
                f"nothing; put its roles into another group"
            )


def _check_scorers(groups: Groups, method: Method, role: str) -> None:
    """What scores the samples of a role is in its own group, or all in one earlier group."""
    scorers, home = method.scored_by.get(role, ()), group_of(groups, role)
    homes = {group_of(groups, scorer) for scorer in scorers}
    if homes <= {home}:
        return
    places = " and ".join(f"{s} (in {group_of(groups, s)!r})" for s in scorers)
    wrong = f"a phase of {role} (in {home!r}) needs the scores of {places}"
    others = tuple(r for members in groups.values() for r in members if r not in scorers)
    if len(homes) > 1:
        raise UserError(
            f"placement.groups: {wrong}; they score the samples together, so put them into one "
            f"group, as in {write_groups({'critic': scorers, 'actor': others})}"
        )
    (scoring,) = homes
    order = list(groups)
    if order.index(scoring) > order.index(home):
        order.remove(scoring)
        order.insert(order.index(home), scoring)
        raise UserError(
            f"placement.groups: {wrong}, but {scoring!r} comes after {home!r}; groups train in "
            f"their order, and the earlier hands to the later: write "
            f"{write_groups({group: groups[group] for group in order})}"
        )


def _check_order(groups: Groups, role: str, leader: str, cycle: CycleSettings) -> None:
    """Groups train in their order, so the phases of a cycle must have the same.

    `leader`: of those that follow the student, whose name stands for all in `cycle.order`.
    """
    home, other = group_of(groups, STUDENT), group_of(groups, role)
    if home == other:
        return
    first = next(group for group in groups if group in (home, other))
    right = "student_first" if first == home else f"{leader}_first"
    if cycle.order != right:
        last = other if first == home else home
        raise UserError(
            f"placement.groups: {first!r} comes before {last!r}, and groups train in their order, "
            f"but cycle.order is {cycle.order!r}; set cycle.order={right}"
        )
