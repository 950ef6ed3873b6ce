"""Where the processes of a run sit: shares in Ray's own arithmetic, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, ClassVar, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from fewstep.config import parse_recipe
from fewstep.errors import UserError
from fewstep.grouping import check_groups
from fewstep.methods.dmd2_settings import DMD2Settings
from fewstep.methods.method import Method
from fewstep.placement import (
    UNITS,
    PlacementSettings,
    Seat,
    place,
    placement_table,
    rollout_workers,
)
from fewstep.training.cycle import CycleSettings

ROLES = ("student", "fake_score", "teacher_score", "student_ema")
SPLIT = {"critic": ("fake_score", "teacher_score"), "actor": ("student", "student_ema")}
FAKE_FIRST = CycleSettings(order="fake_score_first")
DMD2 = DMD2Settings().build()


def rays_units(share: float) -> int:
    """What Ray makes of a share, by its own truncation."""
    return int(share * 10_000)


def spread(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """A group for each name."""
    return {name: (name,) for name in names}


def refusal(function: Callable[..., object], *arguments: Any) -> str:
    """Why a call is refused."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    return str(error.value)


def test_ray_counts_every_share_as_it_was_meant() -> None:
    shares = [Seat("trainer", "g", 0, 0, units).share for units in range(1, UNITS + 1)]
    assert list(map(rays_units, shares)) == list(range(1, UNITS + 1))
    # Nor does it matter if a version of Ray rounds instead.
    assert [round(share * 10_000) for share in shares] == list(range(1, UNITS + 1))
    assert max(shares) == 1.0


def test_six_groups_fit_beside_rollout_and_reward() -> None:
    settings = PlacementSettings(groups=spread(tuple("abcdef")))
    seats = place(settings, tuple("abcdef"), 1, 1, "cpu").seats
    assert [seat.units for seat in seats] == [1166] * 6 + [2500, 500]
    assert sum(rays_units(seat.share) for seat in seats) <= 10_000
    rounded_up = 6 * rays_units(0.1167) + rays_units(0.25) + rays_units(0.05)
    assert rounded_up > 10_000


TENTHS = st.integers(0, 99_999).map(lambda n: n / 100_000)  # finer than Ray counts


@given(
    trainer=TENTHS.filter(bool),
    rollout=TENTHS,
    reward=TENTHS,
    groups=st.integers(1, 7),
    bundles=st.integers(1, 5),
    workers=st.integers(0, 12),
)
@example(0.7, 0.25, 0.05, 6, 2, 2)
@example(0.7, 0.25, 0.05, 1, 2, 3)
@example(0.0003, 0.0, 0.0, 3, 1, 0)
@example(0.5, 0.5, 0.00001, 1, 1, 1)
def test_shares_are_those_of_exact_arithmetic(
    trainer, rollout, reward, groups, bundles, workers
) -> None:
    names = tuple("abcdefg")[:groups]
    settings = PlacementSettings(
        groups=spread(names), trainer_share=trainer, rollout_share=rollout, reward_share=reward
    )
    # An independent model: what each process is due, cut down to whole units.
    exact = {key: Fraction(str(value)) for key, value in
             (("trainer", trainer), ("rollout", rollout), ("reward", reward))}  # fmt: skip
    whole = {key: (value * 10_000).__floor__() for key, value in exact.items()}
    expected: list[dict[str, int]] = [{} for _ in range(bundles)]
    for bundle in range(bundles):
        expected[bundle] |= {f"{name}/{bundle}": whole["trainer"] // groups for name in names}
        if reward:
            expected[bundle][f"reward/{bundle}"] = whole["reward"]
        mine = [worker for worker in range(workers) if worker % bundles == bundle]
        expected[bundle] |= {f"rollout/{w}": whole["rollout"] // len(mine) for w in mine}
    possible = all(sum(b.values()) <= 10_000 and all(b.values()) for b in expected)
    if not possible:
        refusal(place, settings, names, bundles, workers, "cpu")
        return
    placement = place(settings, names, bundles, workers, "cpu")
    found: list[dict[str, int]] = [{} for _ in range(bundles)]
    for seat in placement.seats:
        assert rays_units(seat.share) == seat.units
        found[seat.bundle][seat.name] = seat.units
    assert found == expected
    assert len(placement.seats) == sum(map(len, expected))


def test_rollout_and_reward_do_not_depend_on_the_number_of_groups() -> None:
    found = []
    for names in ("a", "ab", "abcde"):
        settings = PlacementSettings(groups=spread(tuple(names)))
        placement = place(settings, tuple(names), 2, 3, "cpu")
        found.append([(s.name, s.bundle, s.units) for s in placement.seats if s.kind != "trainer"])
    assert found[0] == found[1] == found[2]
    assert found[0] == [
        ("rollout/0", 0, 1250),
        ("rollout/1", 1, 2500),
        ("rollout/2", 0, 1250),
        ("reward/0", 0, 500),
        ("reward/1", 1, 500),
    ]


def test_one_group_of_all_roles_has_the_whole_share() -> None:
    placement = place(PlacementSettings(trainer_share=0.95), ROLES, 2, 0, "cpu")
    assert placement.groups == {"trainer": ROLES}
    assert [(s.name, s.bundle, s.units) for s in placement.seats_of("trainer")] == [
        ("trainer/0", 0, 9500),
        ("trainer/1", 1, 9500),
    ]
    assert placement.group_of("fake_score") == "trainer"
    assert placement.seats_of("rollout") == ()


def test_a_role_is_found_in_its_group() -> None:
    placement = place(PlacementSettings(groups=SPLIT), ROLES, 1, 1, "cpu")
    assert [placement.group_of(role) for role in ROLES] == ["actor", "critic", "critic", "actor"]
    with pytest.raises(KeyError):
        placement.group_of("discriminator")


@pytest.mark.parametrize(
    ("device", "accelerator", "resource"),
    [
        ("cuda", None, "GPU"),
        ("cuda:1", None, "GPU"),
        ("cpu", None, "accelerator"),
        ("mps", None, "accelerator"),
        ("cuda", "NPU", "NPU"),
    ],
)
def test_the_resource_goes_by_the_device(device, accelerator, resource) -> None:
    settings = PlacementSettings(accelerator=accelerator)
    assert place(settings, ROLES, 1, 0, device).resource == resource


def test_shares_beyond_one_are_refused_with_who_takes_what() -> None:
    settings = PlacementSettings(groups=SPLIT, trainer_share=0.8)
    text = refusal(place, settings, ROLES, 2, 3, "cpu")
    assert text.splitlines() == [
        "placement: the shares of bundle 0 sum to 1.1000, and there is 1 to share (Ray counts in "
        "steps of 0.0001 and rounds down); lower one of these keys:",
        "    0.4000  critic/0: placement.trainer_share 0.8 for 2",
        "    0.4000  actor/0: placement.trainer_share 0.8 for 2",
        "    0.1250  rollout/0: placement.rollout_share 0.25 for 2",
        "    0.1250  rollout/2: placement.rollout_share 0.25 for 2",
        "    0.0500  reward/0: placement.reward_share 0.05",
        "    1.1000  in all",
    ]


def test_one_unit_too_many_is_refused_and_one_less_is_not() -> None:
    place(PlacementSettings(trainer_share=0.95), ROLES, 1, 0, "cpu")
    text = refusal(place, PlacementSettings(trainer_share=0.9501), ROLES, 1, 0, "cpu")
    assert "sum to 1.0001" in text


@pytest.mark.parametrize(
    ("settings", "workers", "nobody"),
    [
        ({"trainer_share": 0.0001, "groups": SPLIT}, 1, "critic/0, actor/0"),
        ({"rollout_share": 0.0}, 1, "rollout/0"),
        ({"rollout_share": 0.0002}, 3, "rollout/0, rollout/1, rollout/2"),
        ({"reward_share": 0.00009}, 0, "reward/0"),
    ],
)
def test_a_share_of_nothing_is_refused(settings, workers, nobody) -> None:
    text = refusal(place, PlacementSettings(**settings), ROLES, 1, workers, "cpu")
    assert f"nothing is left of bundle 0 for {nobody} (Ray" in text
    key = next(iter(settings))
    assert f"    0.0000  {nobody.split(', ')[0]}: placement.{key} {settings[key]!r}" in text


def test_a_reward_share_of_zero_takes_no_seat() -> None:
    placement = place(PlacementSettings(reward_share=0.0), ROLES, 2, 2, "cpu")
    assert {seat.kind for seat in placement.seats} == {"trainer", "rollout"}


def test_the_table_has_a_row_for_each_bundle() -> None:
    table = placement_table(place(PlacementSettings(groups=SPLIT), ROLES, 2, 3, "cuda"))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    lines = [line.split() for line in capture.get().splitlines()]
    assert [line for line in lines if any("/" in word for word in line)] == [
        ["0", "critic/0", "0.3500", "actor/0", "0.3500", "rollout/0", "0.1250", "0.0500",
         "1.0000"],
        ["rollout/2", "0.1250"],
        ["1", "critic/1", "0.3500", "actor/1", "0.3500", "rollout/1", "0.2500", "0.0500",
         "1.0000"],
    ]  # fmt: skip
    assert "shares of one GPU" in capture.get()
    assert "teacher_score" in capture.get()


def test_rollout_workers_are_there_where_another_group_needs_samples() -> None:
    one = {"trainer": ROLES}
    assert rollout_workers(None, SPLIT, DMD2, 4) == 4
    assert rollout_workers(3, SPLIT, DMD2, 4) == 3
    assert rollout_workers(None, one, DMD2, 4) == 0
    assert rollout_workers(0, one, DMD2, 4) == 0
    assert rollout_workers(2, one, DMD2, 4) == 2


# Refusals of groups: groups, and what is said.
BAD_GROUPS: list[tuple[Mapping[str, tuple[str, ...]], str]] = [
    ({}, "is empty"),
    ({**SPLIT, "critic": ("fake", "teacher_score")}, "'fake' (in 'critic') is no role of this run"),
    (
        {"critic": ("fake_score",), "actor": ("student", "student_ema")},
        "teacher_score is in no group; every role of the run lives in one of 'critic', 'actor'",
    ),
    ({"actor": ("student", "student_ema")}, "fake_score and teacher_score are in no group"),
    (
        {**SPLIT, "actor": ("student", "student_ema", "fake_score")},
        "fake_score is in 'critic' and 'actor'; a role lives in one group, once",
    ),
    ({**SPLIT, "actor": ("student", "student_ema", "student")}, "student is in 'actor' twice"),
    ({**SPLIT, "spare": ()}, "'spare' has no roles; give it some, or leave it out"),
    ({"the critic": SPLIT["critic"], "actor": SPLIT["actor"]}, "'the critic' is no name of a grou"),
    ({"a/b": ROLES}, "'a/b' is no name of a group; it may have letters, digits, _ and -"),
    ({"a\n": ROLES}, r"'a\n' is no name of a group"),
    ({"": ROLES}, "'' is no name of a group"),
    ({"rollout": ROLES}, "'rollout' is what other processes of the run are called"),
    ({"reward": ROLES}, "'reward' is what other processes of the run are called"),
    ({"driver": ROLES}, "'driver' is what other processes of the run are called"),
    (
        {"critic": ("fake_score", "teacher_score", "student_ema"), "actor": ("student",)},
        "student_ema is in 'critic' and the student in 'actor'; the average is made where the "
        "student is trained, so put student_ema into 'actor'",
    ),
    (
        {"critic": ("fake_score",), "actor": ("student", "student_ema", "teacher_score")},
        "a phase of student (in 'actor') needs the scores of fake_score (in 'critic') and "
        "teacher_score (in 'actor'); they score the samples together, so put them into one group, "
        "as in {critic: [fake_score, teacher_score], actor: [student, student_ema]}",
    ),
    (
        {"a": ("fake_score",), "b": ("teacher_score",), "c": ("student", "student_ema")},
        "needs the scores of fake_score (in 'a') and teacher_score (in 'b'); they score the "
        "samples together",
    ),
    (
        {"a": ("student", "student_ema", "fake_score"), "b": ("teacher_score",)},
        "needs the scores of fake_score (in 'a') and teacher_score (in 'b'); they score",
    ),
    (
        {"actor": SPLIT["actor"], "critic": SPLIT["critic"]},
        "a phase of student (in 'actor') needs the scores of fake_score (in 'critic') and "
        "teacher_score (in 'critic'), but 'critic' comes after 'actor'; groups train in their "
        "order, and the earlier hands to the later: write "
        "{critic: [fake_score, teacher_score], actor: [student, student_ema]}",
    ),
]


@pytest.mark.parametrize(("groups", "said"), BAD_GROUPS)
def test_groups_that_cannot_run_a_method_are_refused(groups, said) -> None:
    for cycle in (FAKE_FIRST, CycleSettings()):
        text = refusal(check_groups, groups, ROLES, DMD2, cycle)
        assert text.startswith("placement.groups: ")
        assert said in text


@pytest.mark.parametrize("groups", [SPLIT, {"all-of_them2": ROLES}])
def test_groups_that_can_run_a_method_are_taken(groups) -> None:
    check_groups(groups, ROLES, DMD2, FAKE_FIRST)


def test_the_phases_must_have_the_order_of_the_groups() -> None:
    text = refusal(check_groups, SPLIT, ROLES, DMD2, CycleSettings())
    assert text == (
        "placement.groups: 'critic' comes before 'actor', and groups train in their order, but "
        "cycle.order is 'student_first'; set cycle.order=fake_score_first"
    )


class _Unscored(Method):
    """A method whose student phase needs no scores, with a role that does nothing."""

    name: ClassVar[str] = "unscored"
    roles: ClassVar[tuple[str, ...]] = ("student", "fake_score", "spectator")
    trained_roles: ClassVar[tuple[str, ...]] = ("student", "fake_score")


def unscored() -> Method:
    """One of them; nothing that it does not define is called."""
    _Unscored.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return cast(Method, _Unscored())  # type: ignore[abstract]


def test_a_group_that_does_nothing_is_refused() -> None:
    groups = {"a": ("student", "fake_score"), "b": ("spectator",)}
    text = refusal(check_groups, groups, unscored().roles, unscored(), FAKE_FIRST)
    assert "placement.groups: 'b' (spectator) trains nothing and scores nothing" in text


def test_without_scores_either_order_goes_if_the_phases_have_it_too() -> None:
    roles = unscored().roles
    groups = {"a": ("student", "spectator"), "b": ("fake_score",)}
    check_groups(groups, roles, unscored(), CycleSettings())
    text = refusal(check_groups, groups, roles, unscored(), FAKE_FIRST)
    assert "'a' comes before 'b'" in text
    assert "cycle.order=student_first" in text


RAY = {"launch.kind": "ray", "launch.processes": 2}
GROUPS = {"placement.groups": {k: list(v) for k, v in SPLIT.items()}}
FIRST = {"cycle.order": "fake_score_first"}
ASYNC = {"rollout.schedule": "async"}


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        (
            "dmd2",
            GROUPS,
            "placement.groups: {critic: [fake_score, teacher_score], actor: [student, student_ema]}"
            " is given, but launch.kind is 'local', and that is only on Ray: set launch.kind=ray, "
            "or placement.groups=null",
        ),
        (
            "dmd2",
            {"placement.offload": True},
            "placement.offload: true is given, but launch.kind is 'local', and that is only on "
            "Ray: set launch.kind=ray, or placement.offload=false",
        ),
        ("dmd2", {"rollout.workers": 2}, "rollout.workers: 2 is given, but launch.kind is 'local'"),
        (
            "flow_matching",
            ASYNC,
            "rollout.schedule: 'async' is given, but launch.kind is 'local', and that is only on "
            "Ray: set launch.kind=ray, or rollout.schedule=sync",
        ),
        (
            "dmd2",
            RAY | GROUPS,
            "placement.groups: 'critic' comes before 'actor', and groups train in their order, but "
            "cycle.order is 'student_first'; set cycle.order=fake_score_first",
        ),
        (
            "dmd2",
            RAY | {"placement.offload": True},
            "placement.offload: true is given, but there is one group only, 'trainer', and nothing "
            "for it to take turns with",
        ),
        (
            "dmd2",
            RAY | GROUPS | FIRST | {"rollout.workers": 0},
            "rollout.workers: 0 is given, but fake_score (in 'critic') needs samples of the "
            "student (in 'actor'), and only rollout workers make them for another group; set "
            "rollout.workers=null for one a bundle",
        ),
        (
            "flow_matching",
            RAY | {"rollout.workers": 1},
            "rollout.workers: 1 is given, but method 'flow_matching' uses no student samples",
        ),
        (
            "flow_matching",
            RAY | ASYNC,
            "rollout.schedule: 'async' is given, but method 'flow_matching' uses no student "
            "samples; set rollout.schedule=sync",
        ),
        (
            "dmd2",
            RAY | GROUPS | FIRST | ASYNC | {"cycle.fake_batches": "reuse_student"},
            "rollout.schedule: 'async' is given, but cycle.fake_batches is 'reuse_student': the "
            "student's phase is among those that share the samples, and needs them of its current "
            "weights; set cycle.fake_batches=fresh, or rollout.schedule=sync",
        ),
        (
            "dmd2",
            RAY | ASYNC,
            "rollout.schedule: 'async' is given, but there are no rollout workers to make samples "
            "while the groups train",
        ),
        (
            "dmd2",
            RAY | {"rollout.workers": 1, "cycle.fake_batches": "reuse_student"},
            "rollout.workers: 1 is given, but with cycle.fake_batches 'reuse_student' all phases "
            "of the one group use the samples that its first phase has made itself",
        ),
        (
            "dmd2",
            RAY | {"placement.accelerator": "memory"},
            "placement.accelerator: 'memory' is given; it should be a resource that is counted in "
            "accelerators",
        ),
        (
            "dmd2",
            RAY | {"runtime.device": "cuda:1"},
            "runtime.device: 'cuda:1' names one device, but each process on Ray is shown its own; "
            "write 'cuda'",
        ),
        (
            "dmd2",
            RAY | {"launch.address": "somewhere"},
            "address: 'somewhere' is given; it should be 'auto', host:port of a cluster",
        ),
        (
            "dmd2",
            RAY | {"placement.trainer_share": 1.0},
            "placement: the shares of bundle 0 sum to 1.0500, and there is 1 to share",
        ),
        (
            "flow_matching",
            RAY | GROUPS | FIRST,
            "cycle: method 'flow_matching' has no fake_score phases to arrange",
        ),
        (
            "flow_matching",
            RAY | GROUPS,
            "placement.groups: 'fake_score' (in 'critic') is no role of this run; its roles are "
            "student, student_ema",
        ),
    ],
)
def test_recipes_that_cannot_be_placed_are_refused(recipe_values, method, changes, said) -> None:
    text = refusal(parse_recipe, recipe_values(method, changes))
    assert text.startswith("recipe:\n  ")
    assert said in text


def test_a_method_without_stale_samples_says_why_async_is_not_for_it(
    recipe_values, monkeypatch
) -> None:
    monkeypatch.setattr(type(DMD2), "stale_samples", ())
    text = refusal(parse_recipe, recipe_values("dmd2", RAY | GROUPS | FIRST | ASYNC))
    assert (
        "method 'dmd2' has no phase that may learn from samples of an older student; set "
        "rollout.schedule=sync" in text
    )


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("dmd2", {"placement.trainer_share": 1.0}),  # nothing is shared where there is no Ray
        ("dmd2", {"rollout.workers": 0}),
        ("dmd2", RAY),
        ("dmd2", RAY | GROUPS | FIRST),
        ("dmd2", RAY | GROUPS | FIRST | ASYNC | {"placement.offload": True}),
        ("dmd2", RAY | ASYNC | {"rollout.workers": 1}),
        ("dmd2", RAY | GROUPS | FIRST | {"cycle.fake_batches": "reuse_student"}),
        ("flow_matching", RAY),
        ("flow_matching", RAY | {"placement.groups": {"all": ["student", "student_ema"]}}),
    ],
)
def test_recipes_that_can_be_placed_are_taken(make_recipe, method, changes) -> None:
    recipe = make_recipe(method, changes)
    assert recipe.launch.kind == changes.get("launch.kind", "local")
