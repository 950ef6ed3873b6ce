"""Checkpoints that several groups write and any number of groups read."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from fewstep.checkpoint import (
    check_all_read,
    checkpoints_directory,
    discard_draft,
    divide,
    latest_checkpoint,
    load_checkpoint,
    load_network,
    merge_states,
    open_draft,
    plain_state,
    publish_draft,
    save_checkpoint,
    tensor_paths,
    unread,
    verify_checkpoint,
    write_part,
)
from fewstep.errors import TrainingError, UserError
from fewstep.parallel.sharding import Replicated
from fewstep.roles.ema import EMASettings
from fewstep.roles.role import Roles
from fewstep.training.state import empty_state, load_state_dict, state_dict

CRITIC, ACTOR = ("fake_score", "teacher_score"), ("student", "student_ema")
GROUPS = {"critic": CRITIC, "actor": ACTOR}
DOCUMENTS = {"recipe.yaml": "seed: 1\n", "fingerprint.json": "{}"}
WHOLE = Replicated()

MakeRoles = Callable[[Sequence[str], int], Roles]
pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.fixture
def make_roles(build_roles, point_model, storage) -> MakeRoles:
    """Some roles over points, as they are after updates that a seed decides."""

    def make(names: Sequence[str], seed: int) -> Roles:
        trained = [name for name in names if name in ("student", "fake_score")]
        roles = build_roles(point_model, storage, names, trained, ema=EMASettings(decay=0.5))
        train_a_little(roles, torch.Generator().manual_seed(seed))
        return roles

    return make


def train_a_little(roles: Roles, generator: torch.Generator) -> None:
    for role in roles.values():
        if role.optimizer is not None:
            for parameter in role.tensors:
                parameter.grad = torch.randn(
                    parameter.shape, generator=generator, dtype=parameter.dtype
                )
            role.optimizer.step()
            role.optimizer.zero_grad()
            role.attempted, role.successful, role.skipped = 9, 7, 2
    if "student_ema" in roles:
        roles.ema_updates = 7
        with torch.no_grad():
            for parameter in roles["student_ema"].tensors:
                parameter.add_(1)


def save_parts(
    run: Path,
    cycle: int,
    states: Mapping[str, Mapping[str, Any]],
    documents: Mapping[str, str | bytes] = DOCUMENTS,
) -> Path:
    """What a driver does with the states of its groups."""
    shares = divide({group: tensor_paths(state) for group, state in states.items()})
    draft = open_draft(run, cycle, list(states))
    files = {}
    for group, state in states.items():
        files.update(write_part(draft, group, state, shares[group]))
    merged = merge_states([plain_state(state) for state in states.values()])
    return publish_draft(draft, merged, files, documents)


def read(path: Path, roles: Roles, partial: bool = False) -> dict[str, Any]:
    """Load a checkpoint into roles; their state then."""
    state = load_checkpoint(
        path, lambda optimizers: empty_state(roles, WHOLE, optimizers, partial), partial=partial
    )
    load_state_dict(roles, WHOLE, state, partial)
    return state_dict(roles, WHOLE)


def flat(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"{section}/{name}/{key}": tensor.clone()
        for section in ("networks", "optimizers")
        for name, tensors in state[section].items()
        for key, tensor in tensors.items()
    }


def assert_same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for path, tensor in left.items():
        assert torch.equal(tensor, right[path]), path


@pytest.fixture
def states(make_roles) -> dict[str, dict[str, Any]]:
    """Of a critic and an actor after some updates."""
    return {
        group: state_dict(make_roles(names, seed), WHOLE)
        for seed, (group, names) in enumerate(GROUPS.items())
    }


@pytest.fixture
def parts(states, tmp_path) -> Path:
    """A checkpoint that both have written."""
    return save_parts(tmp_path, 3, states)


# Two write, one reads, and the other way round.


def test_what_two_groups_wrote_is_read_by_one(states, parts, make_roles) -> None:
    expected = flat(states["critic"]) | flat(states["actor"])
    roles = make_roles((*CRITIC, *ACTOR), 9)
    assert any(not torch.equal(t, expected[p]) for p, t in flat(state_dict(roles, WHOLE)).items())
    found = read(parts, roles)
    assert_same_tensors(flat(found), expected)
    assert_same_tensors(flat(load_checkpoint(parts)), expected)
    counted = {"attempted": 9, "successful": 7, "skipped": 2, "skipped_in_a_row": 0}
    roles_counted = found["counters"]["roles"]
    assert {name: roles_counted[name] for name in ("student", "fake_score")} == {
        "student": counted,
        "fake_score": counted,
    }
    assert found["counters"]["ema_updates"] == 7
    assert load_checkpoint(parts)["cycle"] == 3


def test_each_tensor_is_written_once_by_the_first_that_holds_it(states, parts) -> None:
    found: dict[str, list[str]] = {}
    for file in (parts / "tensors").rglob("*.safetensors"):
        with safe_open(file, "pt") as content:
            for path in content.keys():  # noqa: SIM118
                found.setdefault(path, []).append(file.parent.name)
    assert {path: groups for path, groups in found.items() if len(groups) > 1} == {}
    assert {p for p, (group,) in found.items() if group == "critic"} == set(flat(states["critic"]))
    assert set(found) == set(flat(states["critic"])) | set(flat(states["actor"]))


def test_one_network_is_read_from_all_folders(states, parts, make_roles) -> None:
    roles = make_roles((*CRITIC, *ACTOR), 9)
    expected = flat(states["critic"]) | flat(states["actor"])
    for name, tensors in roles.storage.tensors.items():
        load_network(parts, name, {key: t.detach() for key, t in tensors.items()})
        for key, tensor in tensors.items():
            assert torch.equal(tensor, expected[f"networks/{name}/{key}"])


def test_what_one_wrote_goes_to_two_groups_and_back(tmp_path, make_roles) -> None:
    state = state_dict(make_roles((*CRITIC, *ACTOR), 5), WHOLE)
    path = save_checkpoint(tmp_path, 4, state, DOCUMENTS)
    readers = {group: make_roles(names, 8) for group, names in GROUPS.items()}
    states = {group: read(path, roles, partial=True) for group, roles in readers.items()}
    check_all_read({group: unread(path, found) for group, found in states.items()})
    again = load_checkpoint(save_parts(tmp_path / "again", 4, states))
    assert_same_tensors(flat(again), flat(state))
    assert again["counters"] == state["counters"]
    # The average is counted where it is.
    assert states["critic"]["counters"]["ema_updates"] == 0
    assert states["actor"]["counters"]["ema_updates"] == 7


def test_what_two_groups_wrote_is_read_by_others(states, parts, make_roles, tmp_path) -> None:
    split = {"one": ("student", "teacher_score"), "two": ("student_ema", "fake_score")}
    readers = {group: make_roles(names, 8) for group, names in split.items()}
    found = {group: read(parts, roles, partial=True) for group, roles in readers.items()}
    check_all_read({group: unread(parts, state) for group, state in found.items()})
    assert_same_tensors(
        flat(load_checkpoint(save_parts(tmp_path / "again", 3, found))),
        flat(states["critic"]) | flat(states["actor"]),
    )


def test_before_the_first_update_optimizers_are_empty_and_known(tmp_path) -> None:
    counters = {"roles": {}, "ema_updates": 0}
    states = {
        group: {"networks": {}, "optimizers": {group: {}}, "counters": counters} for group in "ba"
    }
    loaded = load_checkpoint(save_parts(tmp_path, 1, states))
    assert loaded["optimizers"] == {"b": {}, "a": {}}
    assert list(loaded["optimizers"]) == ["b", "a"]


def test_documents_may_be_bytes(tmp_path, states) -> None:
    documents = {"state of a method.safetensors": to_bytes({"x": torch.arange(3)}), "notes": "ü"}
    for path in (
        save_parts(tmp_path / "parts", 1, states, documents),
        save_checkpoint(tmp_path / "whole", 1, states["actor"], documents),
    ):
        assert (path / "notes").read_text(encoding="utf-8") == "ü"
        with safe_open(path / "state of a method.safetensors", "pt") as content:
            assert content.get_tensor("x").tolist() == [0, 1, 2]
        load_checkpoint(path)


# What is not whole.


@pytest.mark.parametrize("damage", ["missing folder", "missing", "extra", "flipped", "moved"])
def test_damage_in_a_part_is_named(parts, damage) -> None:
    folder = parts / "tensors" / "actor"
    file = min(folder.iterdir())
    if damage == "missing folder":
        shutil.rmtree(folder)
    elif damage == "missing":
        file.unlink()
    elif damage == "extra":
        file = folder / "shard-00009-model-00001-of-00001.safetensors"
        file.write_bytes(b"")
    elif damage == "moved":
        file.rename(parts / "tensors" / file.name)
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    for check in (verify_checkpoint, load_checkpoint):
        with pytest.raises(UserError, match=str(file.relative_to(parts))):
            check(parts)


def test_a_tensor_in_two_parts_is_damage(states, tmp_path) -> None:
    draft = open_draft(tmp_path, 1, ["one", "two"])
    files = {}
    for part in ("one", "two"):
        files.update(write_part(draft, part, states["actor"], tensor_paths(states["actor"])))
    path = publish_draft(draft, plain_state(states["actor"]), files, {})
    name = min(flat(states["actor"]))
    verify_checkpoint(path)
    with pytest.raises(UserError, match=f"is damaged: {name} is in .*/one and in .*/two. Remove"):
        load_checkpoint(path)


def test_what_a_part_did_not_write_is_missing(states, tmp_path, make_roles) -> None:
    draft = open_draft(tmp_path, 1, list(GROUPS))
    files = write_part(draft, "actor", states["actor"], tensor_paths(states["actor"]))
    merged = merge_states([plain_state(state) for state in states.values()])
    path = publish_draft(draft, merged, files, {})
    with pytest.raises(UserError, match=r"tensors of network \w+ are not those .*: missing \w+"):
        read(path, make_roles(CRITIC, 1), partial=True)
    read(path, make_roles(ACTOR, 1), partial=True)


def test_a_file_that_no_group_has_reported_is_an_error(states, tmp_path) -> None:
    save_checkpoint(tmp_path, 1, states["actor"], {})
    draft = open_draft(tmp_path, 2, list(GROUPS))
    shares = divide({group: tensor_paths(state) for group, state in states.items()})
    files = {g: write_part(draft, g, state, shares[g]) for g, state in states.items()}
    with pytest.raises(UserError, match="no rank has reported tensors/critic/shard-00001-model"):
        publish_draft(draft, plain_state(states["actor"]), files["actor"], {})
    assert [p.name for p in checkpoints_directory(tmp_path).iterdir()] == ["cycle_000001"]


def test_a_group_reads_what_it_needs_or_nothing(states, tmp_path, make_roles, storage) -> None:
    path = save_checkpoint(tmp_path, 1, states["actor"], {})
    with pytest.raises(UserError, match=r"saved optimizers are not those .*missing fake_score"):
        read(path, make_roles(CRITIC, 1), partial=True)
    if storage == "independent":
        with pytest.raises(
            UserError, match=r"saved networks are not those .*missing teacher_score"
        ):
            read(path, make_roles(("student", "teacher_score"), 1), partial=True)
    else:
        # The base is there, and with it the teacher's weights; but not what counts its updates.
        with pytest.raises(UserError, match=r"saved roles are not those .*missing teacher_score"):
            read(path, make_roles(("student", "teacher_score"), 1), partial=True)


def test_a_group_reads_another_group_s_state_only_when_asked_to(parts, make_roles) -> None:
    with pytest.raises(UserError, match=r"saved optimizers .*left over fake_score"):
        read(parts, make_roles(ACTOR, 1))
    roles = make_roles(ACTOR, 1)
    state = load_checkpoint(
        parts, lambda optimizers: empty_state(roles, WHOLE, optimizers, True), partial=True
    )
    with pytest.raises(UserError, match=r"saved roles .*left over fake_score, teacher_score"):
        load_state_dict(roles, WHOLE, state)


def test_a_role_that_nobody_reads_is_named(parts, make_roles) -> None:
    left = {"actor": unread(parts, read(parts, make_roles(ACTOR, 1), partial=True))}
    with pytest.raises(UserError) as error:
        check_all_read(left)
    message = str(error.value)
    assert "no group (actor) has: " in message
    for name in ("optimizers/fake_score", "roles/fake_score", "roles/teacher_score"):
        assert name in message
    assert "optimizers/fake_score/" not in message
    assert "placement.groups" in message
    left["critic"] = unread(parts, read(parts, make_roles(CRITIC, 1), partial=True))
    check_all_read(left)


def test_a_tensor_that_nobody_reads_is_named() -> None:
    left = {"a": ["networks/n/x", "networks/n/y"], "b": ["networks/n/y", "roles/student"]}
    with pytest.raises(UserError, match=r"no group \(a, b\) has: networks/n/y\. Each"):
        check_all_read(left)
    check_all_read({"a": ["networks/n/x"], "b": ["networks/n/y"]})


# The driver.


def test_the_first_group_that_holds_a_tensor_writes_it() -> None:
    held = {"a": ["x", "y"], "b": ["z", "y", "w"], "c": ["x", "y"]}
    assert divide(held) == {"a": ["x", "y"], "b": ["z", "w"], "c": []}
    assert divide(dict(reversed(held.items()))) == {"c": ["x", "y"], "b": ["z", "w"], "a": []}


def plain(roles: Sequence[str], updates: int = 0, **more: Any) -> dict[str, Any]:
    counters = {"roles": {role: {"attempted": 1} for role in roles}, "ema_updates": updates}
    return {
        "counters": counters,
        "tensors": {"networks": ["base", *roles], "optimizers": []},
    } | more


def test_states_are_merged_in_order() -> None:
    merged = merge_states([plain(["b"], method={"x": 1}), plain(["c", "a"], 5), plain([])])
    assert list(merged["counters"]["roles"]) == ["b", "c", "a"]
    assert merged["counters"]["ema_updates"] == 5
    assert merged["tensors"] == {"networks": ["base", "b", "c", "a"], "optimizers": []}
    assert merged["method"] == {"x": 1}
    assert merge_states([merged]) == merged


def test_states_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(TrainingError, match="two groups have counted the updates of b"):
        merge_states([plain(["a", "b"]), plain(["b"])])
    with pytest.raises(TrainingError, match="groups differ in seen: 1 and 2"):
        merge_states([plain(["a"], seen=1), plain(["b"], seen=2)])


@pytest.mark.parametrize("name", ["a/b", "..", "a.safetensors", "ä"])
def test_a_name_that_is_no_folder_s_is_refused(tmp_path, name) -> None:
    with pytest.raises(UserError, match=f"group '{name}' cannot have a folder"):
        open_draft(tmp_path, 1, ["actor", name])
    assert not checkpoints_directory(tmp_path).exists()


def test_a_group_cannot_write_what_it_does_not_hold(states, tmp_path) -> None:
    draft = open_draft(tmp_path, 1, ["actor"])
    with pytest.raises(TrainingError, match="does not hold optimizers/fake_score/"):
        write_part(draft, "actor", states["actor"], [max(tensor_paths(states["critic"]))])
    with pytest.raises(UserError, match=r"cycle_000001 could not be written: .*tensors/critic"):
        write_part(draft, "critic", states["critic"], [])
    # Other groups may be writing: it is left to the driver.
    assert draft.is_dir()
    discard_draft(draft)
    assert list(checkpoints_directory(tmp_path).iterdir()) == []


def test_a_kill_before_publishing_leaves_the_older_checkpoint(states, tmp_path) -> None:
    older = save_parts(tmp_path, 1, states)
    child = os.fork()
    if child == 0:
        try:
            draft = open_draft(tmp_path, 2, list(GROUPS))
            for group, state in states.items():
                write_part(draft, group, state, tensor_paths(state))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    names = sorted(p.name for p in checkpoints_directory(tmp_path).iterdir())
    assert names == [".cycle_000002.tmp", "cycle_000001"]
    assert latest_checkpoint(tmp_path) == older
    load_checkpoint(older)
    newer = save_parts(tmp_path, 3, states)
    assert sorted(checkpoints_directory(tmp_path).iterdir()) == [older, newer]
    listed = json.loads((newer / "manifest.json").read_text())["files"]
    assert {name.rpartition("/")[0] for name in listed} == {"", "tensors/critic", "tensors/actor"}
