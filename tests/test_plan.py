"""What `fewstep plan` says of a recipe: the steps of its cycles, and who sits where."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewstep.config import Recipe
from fewstep.errors import UserError
from fewstep.methods.dmd2 import DMD2
from fewstep.plan import Step, cycle_steps
from fewstep.training.cycle import plan_cycle

ROOT = Path(__file__).parents[1]
SPLIT = {"critic": ["fake_score", "teacher_score"], "actor": ["student", "student_ema"]}
RAY = {"launch.kind": "ray", "launch.processes": 2}
TWO = {**RAY, "placement.groups": SPLIT, "cycle.order": "fake_score_first"}
NEVER = {"checkpoint.every": 1000, "train.cycles": 1000}
OVERRIDES = (
    "launch.kind=ray",
    "launch.processes=2",
    "cycle.order=fake_score_first",
    "placement.groups={critic: [fake_score, teacher_score], actor: [student, student_ema]}",
)

Steps = Callable[..., list[Step]]
RunPlan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def steps(make_recipe: Callable[..., Recipe]) -> Steps:
    """The steps of a cycle of a tiny recipe: K is 2, and nothing is saved."""

    def make(changes: dict[str, Any], cycle: int = 5, method: str = "dmd2") -> list[Step]:
        return cycle_steps(make_recipe(method, {**NEVER, **changes}), cycle)

    return make


def names(steps: list[Step]) -> list[str]:
    """What is done, in order."""
    return [step.name for step in steps]


@pytest.mark.parametrize("kind", [{}, RAY])
def test_one_group_does_all_by_itself(steps: Steps, kind) -> None:
    assert steps(kind) == [
        Step("student", "trainer", "student", "its own samples"),
        Step("fake_score/0", "trainer", "fake_score", "its own samples"),
        Step("fake_score/1", "trainer", "fake_score", "its own samples"),
    ]


@pytest.mark.parametrize("kind", [{}, RAY])
def test_phases_of_one_group_that_share_samples_take_them_from_the_first(
    steps: Steps, kind
) -> None:
    changes = {**kind, "cycle.fake_batches": "reuse_student"}
    assert steps(changes) == [
        Step("student", "trainer", "student", "its own samples", "x0 for fake_score/0 to 1"),
        Step("fake_score/0", "trainer", "fake_score", "x0 from student"),
        Step("fake_score/1", "trainer", "fake_score", "x0 from student"),
    ]
    assert steps({**changes, "cycle.order": "fake_score_first"}) == [
        Step("fake_score/0", "trainer", "fake_score", "its own samples", "x0 for fake_score/1"),
        Step("fake_score/1", "trainer", "fake_score", "x0 from fake_score/0"),
        Step("student", "trainer", "student", "its own samples"),
    ]


def test_flow_matching_learns_from_data(steps: Steps) -> None:
    for kind in ({}, RAY):
        assert steps(kind, method="flow_matching") == [
            Step("student", "trainer", "student", "data")
        ]


def test_two_groups_hand_over_what_the_later_one_needs(steps: Steps) -> None:
    assert steps(TWO) == [
        Step("rollout fake_score/0", "rollout", gives="x0 for fake_score/0"),
        Step("rollout fake_score/1", "rollout", gives="x0 for fake_score/1"),
        Step("rollout student", "rollout", gives="x0 for score student"),
        Step("fake_score/0", "critic", "fake_score", "x0 from rollout"),
        Step("fake_score/1", "critic", "fake_score", "x0 from rollout"),
        Step(
            "score student",
            "critic",
            None,
            "x0 from rollout",
            "direction, nonfinite_entries for student",
        ),
        Step("student", "actor", "student", "direction, nonfinite_entries from critic"),
        Step("push", "actor", gives="the student's weights to rollout"),
    ]


def test_two_groups_that_share_samples_have_them_made_once(steps: Steps) -> None:
    found = steps({**TWO, "cycle.fake_batches": "reuse_student"})
    assert found[0] == Step(
        "rollout student", "rollout", gives="x0 for fake_score/0 to 1, score student"
    )
    assert names(found)[1:] == ["fake_score/0", "fake_score/1", "score student", "student", "push"]
    assert {step.takes for step in found[1:4]} == {"x0 from rollout"}
    # Nobody hands over samples that the rollout workers have made.
    assert [step.gives for step in found[1:3]] == ["", ""]


ADVERSARIAL = {
    "method.adversarial": {},
    "optimizers.discriminator": {"lr": 0.01},
    "data.name": "custom",
}


def test_the_discriminator_follows_the_fake_score_and_sees_data_too(steps: Steps) -> None:
    assert steps(ADVERSARIAL)[:3] == [
        Step("student", "trainer", "student", "its own samples"),
        Step("fake_score/0", "trainer", "fake_score", "its own samples", "x0 for discriminator/0"),
        Step("discriminator/0", "trainer", "discriminator", "data, x0 from fake_score/0"),
    ]
    groups = {**SPLIT, "critic": [*SPLIT["critic"], "discriminator"]}
    found = steps({**ADVERSARIAL, **TWO, "placement.groups": groups})
    assert found[0].gives == "x0 for fake_score/0, discriminator/0"
    judged = next(step for step in found if step.name == "discriminator/0")
    assert judged == Step("discriminator/0", "critic", "discriminator", "data, x0 from rollout")
    given = "direction, nonfinite_entries, adversarial_gradient, adversarial_loss"
    assert found[-2].takes == f"{given} from critic"


def test_a_classifier_that_is_trained_with_the_fake_score_has_no_phases(steps: Steps) -> None:
    joint = {
        **ADVERSARIAL,
        "method.adversarial": {"trained_with": "fake_score"},
        "optimizers.discriminator": None,
    }
    assert steps(joint)[:3] == [
        Step("student", "trainer", "student", "its own samples"),
        Step("fake_score/0", "trainer", "fake_score", "data, its own samples"),
        Step("fake_score/1", "trainer", "fake_score", "data, its own samples"),
    ]
    found = steps({**joint, **TWO})
    judged = next(step for step in found if step.name == "fake_score/0")
    assert judged == Step("fake_score/0", "critic", "fake_score", "data, x0 from rollout")
    given = "direction, nonfinite_entries, adversarial_gradient, adversarial_loss"
    assert found[-2].takes == f"{given} from critic"


def test_the_discriminator_lives_with_the_scores(make_recipe: Callable[..., Recipe]) -> None:
    groups = {**SPLIT, "actor": [*SPLIT["actor"], "discriminator"]}
    with pytest.raises(UserError, match="they score the samples together, so put them into one"):
        make_recipe("dmd2", {**ADVERSARIAL, **TWO, "placement.groups": groups})
    groups = {**SPLIT, "critic": [*SPLIT["critic"], "discriminator"]}
    wrong = {**ADVERSARIAL, **TWO, "placement.groups": groups, "cycle.order": "student_first"}
    with pytest.raises(UserError, match=r"set cycle\.order=fake_score_first$"):
        make_recipe("dmd2", wrong)


def test_rollout_workers_of_one_group_feed_the_fake_score_only(steps: Steps) -> None:
    found = steps({**RAY, "rollout.workers": 1})
    # As without workers, the fake score learns from the student that has just been updated.
    assert names(found) == [
        "student",
        "push",
        "rollout fake_score/0",
        "rollout fake_score/1",
        "fake_score/0",
        "fake_score/1",
    ]
    assert found[0].takes == "its own samples"
    assert [step.takes for step in found[4:]] == ["x0 from rollout"] * 2


def test_with_offload_the_groups_and_the_rollout_workers_take_turns(steps: Steps) -> None:
    offload = {**TWO, "placement.offload": True}
    train = ["wake critic", "fake_score/0", "fake_score/1", "score student"]
    train += ["sleep critic", "wake actor", "student", "wake rollout", "push"]
    rollouts = ["rollout fake_score/0", "rollout fake_score/1", "rollout student"]
    # Every group is put to sleep as it is started; rollout workers are given weights first.
    begin = ["wake actor", "push", *rollouts, "sleep rollout", "sleep actor"]
    assert sorted(names(steps(offload, 1))) == sorted([*begin, *train])
    assert names(steps(offload, 1))[:5] == begin[:5]
    assert names(steps(offload, 2)) == [*rollouts, "sleep actor", "sleep rollout", *train]
    turn = next(step for step in steps(offload) if step.name == "sleep critic")
    assert turn == Step("sleep critic", "critic")


def test_with_offload_a_group_that_only_scores_is_woken_for_it(steps: Steps, monkeypatch) -> None:
    monkeypatch.setattr(DMD2, "scored_by", {"student": ("teacher_score",)})
    groups = {"judge": ["teacher_score"], "all": ["student", "student_ema", "fake_score"]}
    found = steps({**RAY, "placement.groups": groups, "placement.offload": True})
    assert names(found) == [
        "wake rollout",
        "rollout student",
        "rollout fake_score/0",
        "rollout fake_score/1",
        "sleep all",
        "sleep rollout",
        "wake judge",
        "score student",
        "sleep judge",
        "wake all",
        "student",
        "wake rollout",
        "push",
        "sleep rollout",
        "fake_score/0",
        "fake_score/1",
    ]


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_with_offload_one_group_is_awake_at_a_time_whatever_the_cycle(
    make_recipe, schedule
) -> None:
    changes = {**TWO, "placement.offload": True, "cycle.warmup_cycles": 4, "train.cycles": 9}
    changes |= {"validation": {"every": 3}, "checkpoint.every": 2, "data.name": "digits"}
    recipe = make_recipe("dmd2", changes | {"rollout.schedule": schedule})
    awake = {"rollout"}
    for cycle in range(1, 10):
        for step in cycle_steps(recipe, cycle):
            if step.name.startswith("wake"):
                assert step.group not in awake
                awake |= {step.group}
            elif step.name.startswith("sleep"):
                awake.remove(step.group)
            elif step.group != "driver":
                assert step.group in awake, (cycle, step)
            assert len(awake & SPLIT.keys()) <= 1
            if step.name == "push":
                assert awake == {"actor", "rollout"}
            elif step.role is not None or step.name == "score student":
                assert ("rollout" in awake) == (schedule == "async")


def test_rollout_workers_make_the_samples_to_validate_by(make_recipe) -> None:
    changes = {**TWO, "cycle.warmup_cycles": 2, "train.cycles": 9, "data.name": "digits"}
    recipe = make_recipe("dmd2", changes | {"validation": {"every": 1}})
    found = {c: [s for s in cycle_steps(recipe, c) if s.name == "validate"] for c in (2, 3)}
    # There is nothing to tell of a student that was never updated.
    assert found == {2: [], 3: [Step("validate", "rollout", takes="weights from actor")]}


def test_in_warm_up_nothing_is_scored_or_pushed(steps: Steps) -> None:
    warm = {**TWO, "cycle.warmup_cycles": 5}
    phases = ["rollout fake_score/0", "rollout fake_score/1", "fake_score/0", "fake_score/1"]
    assert names(steps(warm, 5)) == phases
    assert names(steps(warm, 6)) == names(steps(TWO))
    shared = steps({**warm, "cycle.fake_batches": "reuse_student"}, 5)
    assert shared[0] == Step("rollout student", "rollout", gives="x0 for fake_score/0 to 1")
    # With offload, the critic stays where it is.
    turns = ["wake rollout", *phases[:2], "sleep rollout", *phases[2:]]
    assert names(steps({**warm, "placement.offload": True}, 5)) == turns


def test_async_makes_the_fake_scores_samples_a_cycle_ahead(steps: Steps) -> None:
    late = {**TWO, "rollout.schedule": "async"}
    found = steps(late)
    assert names(found) == [
        "rollout student",
        "rollout next fake_score/0",
        "rollout next fake_score/1",
        "fake_score/0",
        "fake_score/1",
        "score student",
        "student",
        "push",
    ]
    assert found[0].gives == "x0 for score student"
    assert found[1].gives == "x0 for next fake_score/0"
    assert found[3].takes == found[4].takes == "older x0 from rollout"
    assert found[5].takes == "x0 from rollout"


def test_async_makes_all_at_the_start_and_goes_on_as_if_there_were_no_end(steps: Steps) -> None:
    late = {**TWO, "rollout.schedule": "async"}
    first, last = steps(late, 1), steps(late, 1000)
    assert names(first)[:6] == [
        "push",
        "rollout fake_score/0",
        "rollout fake_score/1",
        "rollout student",
        "rollout next fake_score/0",
        "rollout next fake_score/1",
    ]
    assert first[6].takes == "x0 from rollout"
    assert names(last)[:4] == [
        "rollout student",
        "rollout next fake_score/0",
        "rollout next fake_score/1",
        "fake_score/0",
    ]
    assert last[3].takes == "older x0 from rollout"


@pytest.mark.parametrize("changes", [{}, {"cycle.warmup_cycles": 3}, TWO])
@pytest.mark.parametrize("cycle", [1, 3, 4])
def test_the_phases_are_those_that_are_run(make_recipe, changes, cycle) -> None:
    recipe = make_recipe("dmd2", changes)
    phases = plan_cycle(cycle, 2, recipe.cycle)
    trained = [(s.name, s.role) for s in cycle_steps(recipe, cycle) if s.role is not None]
    assert trained == [(phase.name, phase.role) for phase in phases]


@pytest.mark.parametrize(("kind", "saver"), [(TWO, "driver"), ({}, "trainer")])
def test_validation_and_saving_come_when_due(make_recipe, kind, saver) -> None:
    changes = {**kind, "train.cycles": 7, "checkpoint.every": 2, "data.name": "digits"}
    recipe = make_recipe("dmd2", changes | {"validation": {"every": 3}})
    due = {
        cycle: [(s.name, s.group) for s in cycle_steps(recipe, cycle)
                if s.name in ("validate", "save")]
        for cycle in range(1, 8)
    }  # fmt: skip
    save, validate = ("save", saver), ("validate", "rollout" if kind else "trainer")
    both = [validate, save]
    assert due == {1: [], 2: [save], 3: [validate], 4: [save], 5: [], 6: both, 7: both}


@pytest.fixture
def plan(fewstep: RunPlan) -> RunPlan:
    """Run `fewstep plan` on the digits' student: exit code, standard output, standard error."""
    return lambda *overrides: fewstep("plan", ROOT / "recipes/digits/student.yaml", *overrides)


def step_rows(out: str) -> list[str]:
    """The rows of the table of steps, their cells joined by one space."""
    lines = out.partition("hands over")[2].splitlines()[2:]
    return [" ".join(line.split()) for line in lines[: lines.index("")] if line.strip()]


def test_a_local_recipe_is_shown_without_a_placement(plan: RunPlan) -> None:
    code, out, _ = plan()
    assert code == 0
    assert step_rows(out) == [
        "student trainer student its own samples",
        *(f"fake_score/{k} trainer fake_score its own samples" for k in range(5)),
        "validate trainer",
        "save trainer",
    ]
    assert "Of all cycles: validated every 10, saved every 20, and the last." in out
    assert "Placement" not in out
    assert "Samples are made" not in out
    assert "Cycles 1 to 30 train the fake score only: fake_score/0 to 4." in out


def test_a_recipe_of_two_groups_is_shown_with_its_placement(plan: RunPlan) -> None:
    code, out, _ = plan(*OVERRIDES)
    assert code == 0
    seats = "0 critic/0 0.3500 actor/0 0.3500 rollout/0 0.2500 0.0500 1.0000"
    assert seats in " ".join(out.split())
    assert step_rows(out) == [
        *(f"rollout fake_score/{k} rollout x0 for fake_score/{k}" for k in range(5)),
        "rollout student rollout x0 for score student",
        *(f"fake_score/{k} critic fake_score x0 from rollout" for k in range(5)),
        "score student critic x0 from rollout direction, nonfinite_entries for student",
        "student actor student direction, nonfinite_entries from critic",
        "push actor the student's weights to rollout",
        "validate rollout weights from actor",
        "save driver",
    ]
    warm = "rollout fake_score/0 to 4 -> fake_score/0 to 4."
    assert f"Cycles 1 to 30 train the fake score only: {warm}" in out
    assert "Samples are made 6 times a cycle, 128 each." in out


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (("cycle.fake_batches=reuse_student",), "made once a cycle, 128 each, for all phases."),
        (
            ("rollout.schedule=async", "rollout.max_staleness=3"),
            "fake_score learns from samples that were made while the cycle before trained, by a "
            "student that is an update older; more than 3 behind is an error.",
        ),
        (("placement.offload=true",), "offload: only who is awake"),
        (("cycle.warmup_cycles=1",), "Cycle 1 trains the fake score only: push -> rollout"),
    ],
)
def test_what_the_steps_do_not_tell_is_noted(plan: RunPlan, overrides, note) -> None:
    code, out, _ = plan(*OVERRIDES, *overrides)
    assert code == 0
    assert note in " ".join(out.split())
    assert note not in " ".join(plan(*OVERRIDES)[1].split())


def test_the_usual_cycle_is_shown_and_not_the_first(plan: RunPlan) -> None:
    _, out, _ = plan(*OVERRIDES, "placement.offload=true", "cycle.warmup_cycles=0")
    assert step_rows(out)[6] == "sleep actor actor"
    _, out, _ = plan(*OVERRIDES, "rollout.schedule=async", "cycle.warmup_cycles=0")
    assert step_rows(out)[0] == "rollout student rollout x0 for score student"


def test_a_recipe_that_cannot_be_placed_is_refused(plan: RunPlan) -> None:
    code, out, err = plan(*OVERRIDES, "placement.trainer_share=0.9")
    assert code == 2
    assert out == ""
    assert "the shares of bundle 0 sum to 1.2000" in err
    assert "    0.4500  critic/0: placement.trainer_share 0.9 for 2" in err


def test_planning_starts_no_ray_and_reads_no_weights(tmp_path: Path) -> None:
    """In a folder where the teacher's weights are not; Ray must not even be imported."""
    script = (
        "import sys; from fewstep.config import load_recipe; from fewstep.plan import plan_recipe; "
        "plan_recipe(load_recipe(sys.argv[1], sys.argv[2:])); "
        "sys.exit(any(m in sys.modules for m in ('ray', 'diffusers', 'peft')))"
    )
    recipe = str(ROOT / "recipes/digits/student.yaml")
    command = [sys.executable, "-c", script, recipe, *OVERRIDES, "model.weights=not/there"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_memory_of_one_two_and_eight_is_shown(fewstep: RunPlan) -> None:
    code, out, _ = fewstep("plan", ROOT / "recipes/mixture/dmd2.yaml")
    assert code == 0
    header = next(line for line in out.splitlines() if line.startswith("what"))
    assert header.split() == ["what", "1", "GPU", "2", "GPUs,", "fsdp2", "8", "GPUs,", "fsdp2"]
    assert "Fits" not in out


def test_weights_that_are_not_there_leave_the_memory_unknown(plan: RunPlan) -> None:
    code, out, _ = plan("model.weights=not/there")
    assert code == 0
    assert "Memory: not known: not/there is not here" in " ".join(out.split())
    code, _, err = plan("model.weights=not/there", "--gpus", "1x80GB")
    assert code == 2
    assert "(model.network)" in err


def test_a_recipe_that_fits_is_told_what_is_left(fewstep: RunPlan) -> None:
    code, out, _ = fewstep("plan", ROOT / "recipes/mixture/dmd2.yaml", "--gpus", "2x24GiB")
    assert code == 0
    assert re.search(r"Fits on 2 x 25\.77 GB, with 24\.\d\d GB left\.", out)


def test_a_recipe_that_does_not_fit_ends_with_an_error(fewstep: RunPlan) -> None:
    network = "model.network={sample_size: 32, num_layers: 4, num_attention_heads: 8}"
    changes = ["model.weights=null", network, "--gpus", "1x1200MB"]
    code, out, err = fewstep("plan", ROOT / "recipes/digits/student.yaml", *changes)
    assert code == 2
    assert "Does not fit on 1 x 1.20 GB: needs" in out
    assert "train.micro_batch_size=1: " in out
    assert "--gpus: the recipe does not fit on 1 x 1.20 GB: needs" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("gpus", ["80GB", "1x80gb", "0x80GB"])
def test_devices_that_cannot_be_read_are_refused(plan: RunPlan, gpus) -> None:
    code, out, err = plan("--gpus", gpus)
    assert code == 2
    assert out == ""
    assert f"--gpus: {gpus!r} is given; it should be like 1x80GB" in err


def test_more_devices_than_samples_are_refused(fewstep: RunPlan) -> None:
    recipe = ROOT / "recipes/mixture/dmd2.yaml"
    code, _, err = fewstep("plan", recipe, "train.batch_size=4", "--gpus", "8x80GB")
    assert code == 2
    assert "--gpus: 8 are given, but train.batch_size is 4" in err
