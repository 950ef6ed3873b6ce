"""Who sits where: the processes of a run on a cluster, and their shares of its accelerators.

Nothing here needs Ray. Ray counts a resource in steps of 1e-4 and rounds down, and a process whose
share does not fit waits for ever without an error; so shares are counted in those steps here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal, Protocol, final

from pydantic import Field, field_validator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fewstep.errors import UserError
from fewstep.grouping import REWARD, ROLLOUT, Groups, group_of, write_groups
from fewstep.grouping import check_groups as check_groups
from fewstep.methods.method import Method
from fewstep.parallel.settings import LaunchSettings
from fewstep.roles.role import STUDENT
from fewstep.settings import Settings
from fewstep.training.cycle import CycleSettings

UNITS = 10_000
# What Ray counts in bytes.
NO_ACCELERATORS = ("memory", "object_store_memory")
"""Steps in which Ray counts one accelerator."""
ONE_GROUP = "trainer"

Share = Annotated[float, Field(ge=0, le=1)]
SeatKind = Literal["trainer", "rollout", "reward"]


@final
class PlacementSettings(Settings):
    """How the processes of a run on Ray share the accelerators."""

    groups: dict[str, tuple[str, ...]] | None = Field(
        None,
        description="group -> roles, in the order in which the groups train, as in {critic: "
        "[fake_score, teacher_score], actor: [student, student_ema]}; null: one group of all roles",
    )
    accelerator: str | None = Field(
        None,
        description="the cluster's resource of which each worker takes one; null: GPU for cuda, "
        "and for other devices the logical resource 'accelerator'",
    )
    trainer_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.7, description="of each accelerator for the trainer groups together"
    )
    rollout_share: Share = Field(0.25, description="of each accelerator for rollout workers")
    reward_share: Share = Field(0.05, description="of each accelerator, kept free for a reward")
    offload: bool = Field(
        False,
        description="only one group's weights and optimizers are on the accelerators at a time",
    )
    timeout_seconds: Annotated[int, Field(gt=0)] = Field(
        120, description="how long a process may wait for its place before the run is refused"
    )

    @field_validator("accelerator")
    @classmethod
    def _check_accelerator(cls, name: str | None) -> str | None:
        if name is not None and (not name.strip() or name in NO_ACCELERATORS):
            raise ValueError(
                f"{name!r} is given; it should be a resource that is counted in accelerators, such "
                f"as GPU, CPU or one that `ray start --resources` has named"
            )
        return name


class RolloutWish(Protocol):
    """What placement needs to know of the recipe's `rollout` section."""

    @property
    def workers(self) -> int | None:
        """Rollout workers; None: as many as are needed."""
        ...

    @property
    def schedule(self) -> Literal["sync", "async"]:
        """When samples are made."""
        ...


@final
@dataclass(frozen=True)
class Seat:
    """The place of one process.

    Attributes:
        kind: what it does. A reward's seat is kept free: no process is started for it.
        group: the trainer group, "rollout" or "reward".
        rank: in its group.
        bundle: which accelerator it sits on.
        units: its part of that, in steps of 1e-4.
    """

    kind: SeatKind
    group: str
    rank: int
    bundle: int
    units: int

    @property
    def name(self) -> str:
        """Group and rank, e.g. "critic/0"."""
        return f"{self.group}/{self.rank}"

    @property
    def share(self) -> float:
        """The share to ask Ray for: `int(share * 10_000)` is `units`."""
        share = self.units / UNITS
        # 0.0003 * 10_000 is a little less than 3.
        return share if int(share * UNITS) == self.units else math.nextafter(share, math.inf)


@final
@dataclass(frozen=True)
class Placement:
    """All processes of a run, and their places.

    Attributes:
        resource: of which each bundle has one.
        bundles: accelerators of the run; the size of every trainer group.
        groups: the trainer groups, in the order in which they train.
        seats: of trainers by group and rank, then of rollout workers, then of rewards.
    """

    resource: str
    bundles: int
    groups: Groups
    seats: tuple[Seat, ...]

    def group_of(self, role: str) -> str:
        """The trainer group in which a role lives; raises KeyError for one that is in none."""
        return group_of(self.groups, role)

    def seats_of(self, group: str) -> tuple[Seat, ...]:
        """Of a trainer group, of "rollout" or of "reward", by rank."""
        return tuple(seat for seat in self.seats if seat.group == group)


def groups_of(settings: PlacementSettings, roles: Sequence[str]) -> Groups:
    """The trainer groups of a run: those of the recipe, or one, "trainer", of all roles."""
    return dict(settings.groups) if settings.groups is not None else {ONE_GROUP: tuple(roles)}


def place(
    settings: PlacementSettings,
    roles: Sequence[str],
    bundles: int,
    rollout_workers: int,
    device: str,
) -> Placement:
    """Give every process of a run its seat.

    Rank r of every trainer group sits on bundle r. Rollout workers are dealt over the bundles in
    turn; those on one bundle divide its rollout share.

    Args:
        settings: shares and groups.
        roles: all of the run's.
        bundles: accelerators.
        rollout_workers: processes that make student samples.
        device: of the run, a torch device.

    Raises:
        UserError: where a bundle would be given away more than once, or somebody gets nothing.
    """
    groups = groups_of(settings, roles)
    trainer = _units(settings.trainer_share) // len(groups)
    seats = [Seat("trainer", g, rank, rank, trainer) for g in groups for rank in range(bundles)]
    for worker in range(rollout_workers):
        bundle = worker % bundles
        sharers = len(range(bundle, rollout_workers, bundles))
        units = _units(settings.rollout_share) // sharers
        seats.append(Seat("rollout", ROLLOUT, worker, bundle, units))
    if settings.reward_share > 0:
        reward = _units(settings.reward_share)
        seats += [Seat("reward", REWARD, bundle, bundle, reward) for bundle in range(bundles)]
    resource = settings.accelerator or ("GPU" if device.startswith("cuda") else "accelerator")
    placement = Placement(resource, bundles, groups, tuple(seats))
    _check_shares(settings, placement)
    return placement


def rollout_workers(wanted: int | None, groups: Groups, method: Method, bundles: int) -> int:
    """How many rollout workers a run has.

    Args:
        wanted: `rollout.workers`; None: one a bundle where a group without the student learns
            from its samples, or scores them; else none.
        groups: the trainer groups.
        method: which roles need the student's samples.
        bundles: accelerators of the run.

    Raises:
        UserError: for none where they are needed, or some where nobody learns from samples.
    """
    learners = [role for role in method.trained_roles if role != STUDENT]
    home = group_of(groups, STUDENT)
    needing = [*learners, *method.scored_by.get(STUDENT, ())]
    elsewhere = [role for role in needing if group_of(groups, role) != home]
    if wanted is None:
        return bundles if elsewhere else 0
    if wanted == 0 and elsewhere:
        raise UserError(
            f"rollout.workers: 0 is given, but {elsewhere[0]} (in "
            f"{group_of(groups, elsewhere[0])!r}) needs samples of the student (in {home!r}), and "
            f"only rollout workers make them for another group; set rollout.workers=null for one a "
            f"bundle, or put all roles into one group"
        )
    if wanted > 0 and not learners:
        raise UserError(
            f"rollout.workers: {wanted} is given, but method {method.name!r} uses no student "
            f"samples; set rollout.workers=null"
        )
    return wanted


def check_placement(
    settings: PlacementSettings,
    launch: LaunchSettings,
    rollout: RolloutWish,
    cycle: CycleSettings,
    method: Method,
    roles: Sequence[str],
    device: str,
) -> None:
    """Raise UserError where a recipe's sections do not give a run that can be placed.

    Args:
        settings: the section `placement`.
        launch: where the run's processes are.
        rollout: the section `rollout`.
        cycle: order and sharing of the phases.
        method: of the run.
        roles: all of the run's.
        device: of the run, a torch device.
    """
    if launch.kind != "ray":
        _check_local(settings, rollout)
        return
    if ":" in device:
        raise UserError(
            f"runtime.device: {device!r} names one device, but each process on Ray is shown its "
            f"own; write {device.partition(':')[0]!r}"
        )
    groups = groups_of(settings, roles)
    check_groups(groups, roles, method, cycle)
    if settings.offload and len(groups) == 1:
        raise UserError(
            f"placement.offload: true is given, but there is one group only, {next(iter(groups))!r}"
            f", and nothing for it to take turns with; set placement.offload=false, or give "
            f"placement.groups several groups"
        )
    workers = rollout_workers(rollout.workers, groups, method, launch.processes)
    if workers and len(groups) == 1 and cycle.fake_batches == "reuse_student":
        raise UserError(
            f"rollout.workers: {workers} is given, but with cycle.fake_batches 'reuse_student' all "
            f"phases of the one group use the samples that its first phase has made itself; set "
            f"rollout.workers=null, or cycle.fake_batches=fresh"
        )
    if rollout.schedule == "async":
        _check_async(method, cycle, workers)
    place(settings, roles, launch.processes, workers, device)


def placement_table(placement: Placement) -> Table:
    """A row for each bundle: who sits there, with what share, and what that sums to."""
    title = f"Placement: shares of one {placement.resource} for each bundle"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    taken = {seat.group for seat in placement.seats}
    groups = [group for group in (*placement.groups, ROLLOUT, REWARD) if group in taken]
    table.add_column("bundle", justify="right")
    for group in groups:
        about = {ROLLOUT: "student samples", REWARD: "kept free"}
        table.add_column("\n".join([group, *placement.groups.get(group, [about.get(group, "")])]))
    table.add_column("sum", justify="right")
    for bundle, seats in enumerate(_by_bundle(placement)):
        cells = [
            "\n".join(_cell(seat) for seat in seats if seat.group == group) for group in groups
        ]
        table.add_row(str(bundle), *cells, _decimal(sum(seat.units for seat in seats)))
    return table


def _units(share: float) -> int:
    """Whole steps of 1e-4 in a share, as it is written: 0.0003 is 3 of them."""
    return int(Decimal(repr(share)) * UNITS)


def _decimal(units: int) -> str:
    return f"{units // UNITS}.{units % UNITS:04}"


def _cell(seat: Seat) -> str:
    # Nobody sits on what is kept free.
    return f"{seat.name} " * (seat.kind != "reward") + _decimal(seat.units)


def _by_bundle(placement: Placement) -> list[list[Seat]]:
    found: list[list[Seat]] = [[] for _ in range(placement.bundles)]
    for seat in placement.seats:
        found[seat.bundle].append(seat)
    return found


def _check_shares(settings: PlacementSettings, placement: Placement) -> None:
    """Raise UserError with a table where a bundle's seats do not fit, or one is nothing."""
    for bundle, seats in enumerate(_by_bundle(placement)):
        nothing = [seat.name for seat in seats if seat.units == 0]
        total = sum(seat.units for seat in seats)
        if total <= UNITS and not nothing:
            continue
        wrong = f"the shares of bundle {bundle} sum to {_decimal(total)}, and there is 1 to share"
        right = "lower one of these keys"
        if nothing:
            wrong = f"nothing is left of bundle {bundle} for {', '.join(nothing)}"
            right = "raise its share, or have fewer that divide it"
        rows = [f"    {_decimal(s.units)}  {s.name}: {_origin(settings, seats, s)}" for s in seats]
        raise UserError(
            f"placement: {wrong} (Ray counts in steps of 0.0001 and rounds down); {right}:\n"
            + "\n".join([*rows, f"    {_decimal(total)}  in all"])
        )


def _origin(settings: PlacementSettings, seats: Sequence[Seat], seat: Seat) -> str:
    """Where a seat's share comes from, e.g. "placement.trainer_share 0.7 for 2"."""
    key = f"{seat.kind}_share"
    sharers = sum(other.kind == seat.kind for other in seats)
    return f"placement.{key} {getattr(settings, key)!r}" + (f" for {sharers}" * (sharers > 1))


def _check_local(settings: PlacementSettings, rollout: RolloutWish) -> None:
    """Raise UserError for what only Ray can do."""
    asked = (
        ("placement.groups", settings.groups, "null"),
        ("placement.offload", settings.offload, "false"),
        ("rollout.workers", rollout.workers, "null"),
        ("rollout.schedule", rollout.schedule if rollout.schedule != "sync" else None, "sync"),
    )
    for key, value, default in asked:
        if value:
            given = "true" if value is True else repr(value) if isinstance(value, str) else value
            shown = write_groups(value) if isinstance(value, dict) else given
            raise UserError(
                f"{key}: {shown} is given, but launch.kind is 'local', and that is only on Ray: "
                f"set launch.kind=ray, or {key}={default}"
            )


def _check_async(method: Method, cycle: CycleSettings, workers: int) -> None:
    """Raise UserError where samples cannot be made while a cycle trains."""
    wrong = "rollout.schedule: 'async' is given, but "
    if not method.stale_samples:
        samples = "uses no student samples"
        if len(method.trained_roles) > 1:
            samples = "has no phase that may learn from samples of an older student"
        raise UserError(f"{wrong}method {method.name!r} {samples}; set rollout.schedule=sync")
    if cycle.fake_batches == "reuse_student":
        raise UserError(
            f"{wrong}cycle.fake_batches is 'reuse_student': the student's phase is among those "
            f"that share the samples, and needs them of its current weights; set "
            f"cycle.fake_batches=fresh, or rollout.schedule=sync"
        )
    if workers == 0:
        raise UserError(
            f"{wrong}there are no rollout workers to make samples while the groups train; set "
            f"rollout.workers to how many there should be, or rollout.schedule=sync"
        )
