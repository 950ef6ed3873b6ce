"""Checkpoints appear whole or not at all, and what is damaged is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from fewstep import checkpoint as package
from fewstep import files
from fewstep.checkpoint import (
    CheckpointSettings,
    Saver,
    best_checkpoint,
    checkpoint_path,
    checkpoints_directory,
    complete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    open_draft,
    plain_state,
    prune_checkpoints,
    publish_draft,
    read_best,
    save_checkpoint,
    saved_tensors,
    tensor_paths,
    write_best,
    write_part,
)
from fewstep.errors import UserError
from fewstep.launch.hooks import CheckpointHook, RunSaves
from fewstep.launch.local import train

PACKAGE = Path(package.__file__).parent
TRACED = {*map(str, PACKAGE.glob("*.py")), files.__file__, shutil.__file__, filesystem.__file__}
DOCUMENTS = {"recipe.yaml": "seed: 1\n", "fingerprint.json": "{}"}


def state(value: float, size: int = 16) -> dict[str, Any]:
    return {
        "networks": {
            "student": {"weight": torch.full((size,), value), "bias": torch.tensor(value)},
            "teacher_score": {"weight": torch.full((size,), -value)},
        },
        "optimizers": {"student": {"weight/step": torch.tensor(value)}},
        "counters": {"student": int(value)},
    }


def save(run: Path, cycle: int, size: int = 16) -> Path:
    return save_checkpoint(run, cycle, state(cycle, size), DOCUMENTS)


def save_parts(run: Path, cycle: int, size: int = 16) -> Path:
    """As `save`, in two folders."""
    given = state(cycle, size)
    paths = tensor_paths(given)
    draft = open_draft(run, cycle, ["critic", "actor"])
    written = write_part(draft, "critic", given, paths[1:]) | write_part(
        draft, "actor", given, paths[:1]
    )
    return publish_draft(draft, plain_state(given), written, DOCUMENTS)


def assert_holds(loaded: dict[str, Any], cycle: int, size: int = 16) -> None:
    expected = state(cycle, size)
    assert loaded["cycle"] == cycle
    assert loaded["counters"] == expected["counters"]
    for section in ("networks", "optimizers"):
        assert loaded[section].keys() == expected[section].keys()
        for name, tensors in expected[section].items():
            assert loaded[section][name].keys() == tensors.keys()
            for key, value in tensors.items():
                assert torch.equal(loaded[section][name][key], value)


def listing(run: Path) -> list[str]:
    return sorted(p.name for p in checkpoints_directory(run).iterdir())


def test_what_is_saved_is_loaded(tmp_path) -> None:
    path = save(tmp_path, 100)
    assert path == tmp_path / "checkpoints" / "cycle_000100"
    assert_holds(load_checkpoint(path), 100)
    assert (path / "recipe.yaml").read_text() == DOCUMENTS["recipe.yaml"]
    assert listing(tmp_path) == ["cycle_000100"]


@pytest.mark.parametrize("cycles", [(9, 10, 11), (999_999, 1_000_000, 12_345_678)])
def test_the_latest_is_the_highest_cycle(tmp_path, cycles) -> None:
    for cycle in reversed(cycles):
        save(tmp_path, cycle)
    assert [p.name for p in complete_checkpoints(tmp_path)] == [f"cycle_{c:06d}" for c in cycles]
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), cycles[-1])


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.arange(8.0)[::2]},
        {"a": torch.zeros(0), "b": torch.zeros(0, 3), "c": torch.tensor(3)},
        {"a": torch.tensor([1.0], dtype=torch.bfloat16), "b": torch.tensor([True])},
        {"a": torch.tensor([float("nan"), float("inf"), -0.0])},
    ],
)
def test_tensors_of_any_layout(tmp_path, tensors) -> None:
    path = save_checkpoint(tmp_path, 1, {"networks": {"n": tensors}, "optimizers": {}}, {})
    loaded = load_checkpoint(path)["networks"]["n"]
    for key, value in tensors.items():
        assert loaded[key].dtype == value.dtype
        torch.testing.assert_close(loaded[key], value, rtol=0, atol=0, equal_nan=True)


def test_tensors_that_share_memory(tmp_path) -> None:
    flat = torch.arange(6.0)
    tensors = {"tied": flat, "again": flat, "first": flat[:3], "last": flat[3:], "mid": flat[1:5]}
    path = save_checkpoint(tmp_path, 1, {"networks": {"n": tensors}, "optimizers": {}}, {})
    loaded = load_checkpoint(path)["networks"]["n"]
    assert all(torch.equal(loaded[key], value) for key, value in tensors.items())


def test_what_holds_no_tensors_yet_is_there_all_the_same(tmp_path) -> None:
    empty = {"networks": {"n": {}}, "optimizers": {"student": {}, "fake_score": {}}}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, empty, {}))
    assert loaded == {**empty, "cycle": 1}


def test_the_order_of_networks_and_roles_is_kept(tmp_path) -> None:
    names = ["b", "c", "a"]
    given = {s: {n: {"x": torch.ones(1)} for n in names} for s in ("networks", "optimizers")}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, given, {}))
    assert [list(loaded[section]) for section in given] == [names, names]


def test_files_are_cut_where_they_would_be_too_large(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fewstep.checkpoint.tensors.FILE_BYTES", 100)
    path = save(tmp_path, 1, size=10)
    # The student's vector of 80 bytes and its number fit together.
    assert len(list((path / "tensors").iterdir())) == 3
    parts = {str(k): torch.full((20,), float(k)) for k in range(5)}
    path = save_checkpoint(tmp_path, 2, {"networks": {"n": parts}, "optimizers": {}}, {})
    assert len(list((path / "tensors").iterdir())) == 5
    loaded = load_checkpoint(path)["networks"]["n"]
    assert all(torch.equal(loaded[k], v) for k, v in parts.items())


def test_the_files_say_what_they_hold(tmp_path) -> None:
    found = saved_tensors(save(tmp_path, 1) / "tensors")
    assert {k: tuple(v.shape) for k, v in found.items()} == {
        "networks/student/bias": (),
        "networks/student/weight": (16,),
        "networks/teacher_score/weight": (16,),
        "optimizers/student/weight/step": (),
    }
    assert {v.dtype for v in found.values()} == {torch.int64}


@pytest.mark.parametrize("save", [save, save_parts])
def test_every_file_is_flushed_after_its_last_byte(tmp_path, monkeypatch, save) -> None:
    flushed: dict[str, int] = {}
    original = os.fsync

    def watch(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}").replace("/.cycle_000001.tmp", "/new")
        flushed[name] = os.fstat(descriptor).st_size
        original(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    path = save(tmp_path, 1)
    new = path.parent / "new"
    for file in path.rglob("*"):
        name = str(new / file.relative_to(path))
        assert name in flushed, name
        assert not file.is_file() or flushed[name] == file.stat().st_size
    # And the entries of the directories: its own, and its name in the one above.
    assert {str(new), str(path.parent)} <= flushed.keys()


def test_an_older_form_is_refused_with_the_reason(tmp_path) -> None:
    path = save(tmp_path, 1)
    content = json.loads((path / "state.json").read_text())
    del content["tensors"]
    (path / "state.json").write_text(json.dumps(content))
    listed = json.loads((path / "manifest.json").read_text())
    listed["files"]["state.json"] = files.describe_file(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(UserError, match="written by another version of fewstep"):
        load_checkpoint(path)


def test_a_path_that_does_not_exist_is_an_error(tmp_path) -> None:
    with pytest.raises(UserError, match=r"cycle_000007 does not exist"):
        load_checkpoint(checkpoint_path(tmp_path, 7))
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="holds no complete checkpoint"):
            latest_checkpoint(directory)


# Damage.

FILES = [
    "tensors/shard-00001-model-00001-of-00003.safetensors",
    "tensors/shard-00001-model-00002-of-00003.safetensors",
    "tensors/shard-00001-model-00003-of-00003.safetensors",
    "state.json",
    "fingerprint.json",
    "recipe.yaml",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "empty", "flipped"])
def test_a_damaged_file_is_named_and_nothing_older_is_taken_instead(tmp_path, file, damage) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    target = path / file
    content = bytearray(target.read_bytes())
    if damage == "missing":
        target.unlink()
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        target.write_bytes(content)
    else:
        changed = {"truncated": content[:-1], "longer": content + b" ", "empty": b""}[damage]
        target.write_bytes(changed)
    assert latest_checkpoint(tmp_path) == path
    with pytest.raises(UserError) as error:
        load_checkpoint(path)
    assert file in str(error.value)
    assert f"Remove {path} to go on" in str(error.value)


def test_nothing_is_to_be_removed_where_a_damaged_checkpoint_was_moved_to(tmp_path) -> None:
    path = save(tmp_path, 1).rename(tmp_path / "kept")
    (path / "recipe.yaml").unlink()
    with pytest.raises(UserError, match=r"kept lacks recipe\.yaml$"):
        load_checkpoint(path)


@pytest.mark.parametrize("file", ["tensors/shard-00002.safetensors", "notes.txt", "tensors/x"])
def test_an_extra_file_is_named(tmp_path, file) -> None:
    path = save(tmp_path, 1)
    (path / file).write_bytes(b"")
    with pytest.raises(UserError, match=file):
        load_checkpoint(path)


def test_every_flipped_bit_of_the_manifest_is_harmless_or_an_error(tmp_path) -> None:
    path = save(tmp_path, 1)
    manifest = path / "manifest.json"
    original = manifest.read_bytes()
    positions, refused = range(0, len(original), 3), []
    for position in positions:
        content = bytearray(original)
        content[position] ^= 1
        manifest.write_bytes(content)
        try:
            assert_holds(load_checkpoint(path), 1)
        except UserError as error:
            refused.append(str(error))
    assert all(str(path) in message for message in refused)
    # All but white space and the like.
    assert len(refused) > 0.8 * len(positions)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b'{"files": 1}', b'{"files": {"a": 1}}']
)
def test_a_damaged_manifest_is_an_error(tmp_path, content) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / "manifest.json").write_bytes(content)
    assert latest_checkpoint(tmp_path) == path
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        load_checkpoint(path)


def test_a_directory_without_a_manifest_does_not_exist(tmp_path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").unlink()
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        load_checkpoint(checkpoint_path(tmp_path, 2))


@pytest.mark.parametrize(
    "name", ["cycle_1", "cycle_00001x", ".cycle_000009.tmp", "cycle_000009.old"]
)
def test_other_names_are_no_checkpoints(tmp_path, name) -> None:
    path = save(tmp_path, 1)
    shutil.copytree(path, path.parent / name)
    assert complete_checkpoints(tmp_path) == [path]


# Pruning and the best.


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_pruning_keeps_the_newest(tmp_path, keep) -> None:
    for cycle in range(1, 5):
        save(tmp_path, cycle)
        prune_checkpoints(tmp_path, keep)
        expected = [f"cycle_{c:06d}" for c in range(max(1, cycle - keep + 1), cycle + 1)]
        assert listing(tmp_path) == expected


def test_pruning_keeps_the_best(tmp_path) -> None:
    assert read_best(tmp_path) is None
    with pytest.raises(UserError, match="no validation with a metric was run"):
        best_checkpoint(tmp_path)
    for cycle in range(1, 6):
        save(tmp_path, cycle)
        if cycle == 2:
            write_best(tmp_path, {"cycle": 2, "metric": "frechet_distance", "value": 0.5})
        prune_checkpoints(tmp_path, 1)
    assert listing(tmp_path) == ["best.json", "cycle_000002", "cycle_000005"]
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)
    shutil.rmtree(checkpoint_path(tmp_path, 2))
    with pytest.raises(UserError, match="cycle_000002 is missing or incomplete"):
        best_checkpoint(tmp_path)
    (checkpoints_directory(tmp_path) / "best.json").write_text("{")
    with pytest.raises(UserError, match=r"best\.json cannot be read"):
        read_best(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"{}", b"[]", b"3", b"", b"\xff\xfe", b'{"cycle": "x", "metric": "recall", "value": 1}',
        b'{"cycle": 0, "metric": "recall", "value": 1.0}', b'{"cycle": 1, "metric": "recall"}',
        b'{"cycle": 1, "metric": "recall", "value": NaN}', b'{"cycle": 1.5}', b'{"cycle": "x"}',
    ],
)  # fmt: skip
def test_a_best_that_says_something_else_is_an_error_that_says_what_to_do(
    tmp_path, content
) -> None:
    save(tmp_path, 1)
    file = checkpoints_directory(tmp_path) / "best.json"
    file.write_bytes(content)
    for action in (read_best, best_checkpoint, lambda run: prune_checkpoints(run, 1)):
        with pytest.raises(UserError, match=r"best\.json cannot be read.*[Rr]emoving it is safe"):
            action(tmp_path)
    file.unlink()
    assert read_best(tmp_path) is None


@pytest.mark.parametrize("value", [0.5, 2])
def test_the_best_is_read_as_it_was_written(tmp_path, value) -> None:
    save(tmp_path, 1)
    best = {"cycle": 1, "metric": "recall", "value": value}
    write_best(tmp_path, best)
    assert read_best(tmp_path) == best


@pytest.mark.parametrize(
    "name",
    [
        "cycle_notes.txt",
        "cycle_notes",
        "cycle_1",
        ".cycle_mine.tmp",
        "cycle_000009.old",
        ".cycle_000008.tmp",
    ],
)
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_a_run_did_not_write_is_not_removed(tmp_path, name, kind) -> None:
    save(tmp_path, 1)
    path = checkpoints_directory(tmp_path) / name
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    save(tmp_path, 2)
    ours = (name, kind) == (".cycle_000008.tmp", "directory")
    assert path.exists() != ours
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["cycle_000001", "cycle_000002"]


# Killed at any moment.


def traced(each_line: Callable[[int], None], action: Callable[[], None]) -> int:
    """Run an action, calling `each_line` before each of its lines; their number.

    Lines are those of our modules and of the part of the standard library that it calls.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            count += 1
            sys.settrace(None)
            each_line(count)
            sys.settrace(trace)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(previous)
    return count


def states_during(run: Path, copies: Path, action: Callable[[], None]) -> list[Path]:
    """Copies of a run directory, one of each state that a kill during the action could leave."""
    found: list[Path] = []
    seen: list[Any] = [None]

    def look(count: int) -> None:
        files = sorted((str(f), f.is_file() and f.stat().st_size) for f in run.rglob("*"))
        if files != seen[0]:
            seen[0] = files
            found.append(copies / f"{count:05d}")
            shutil.copytree(run, found[-1])

    traced(look, action)
    look(10**5 - 1)
    return found


def kill_at(line: int, action: Callable[[], None]) -> None:
    """Run an action in a child process that is killed before its `line`-th line."""
    child = os.fork()
    if child == 0:
        try:
            traced(lambda count: count == line and os.kill(os.getpid(), signal.SIGKILL), action)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def assert_loads(run: Path) -> int:
    """The newest and the best checkpoint load; the newest's cycle."""
    latest = latest_checkpoint(run)
    cycle = int(latest.name[-6:])
    assert_holds(load_checkpoint(latest), cycle)
    best = read_best(run)
    assert best is not None
    assert_holds(load_checkpoint(best_checkpoint(run)), best["cycle"])
    return cycle


def assert_next_save_cleans_up(run: Path) -> None:
    save(run, 9)
    assert assert_loads(run) == 9
    for path in checkpoints_directory(run).iterdir():
        assert path.name == "best.json" or path in complete_checkpoints(run)


def start_of_run(run: Path, keep: int, save: Callable[..., Path] = save) -> Callable[[], None]:
    """A run with one checkpoint; what saves the second and prunes."""
    save(run, 1)
    write_best(run, {"cycle": 1, "metric": "frechet_distance", "value": 2.0})
    prune_checkpoints(run, keep)

    def action() -> None:
        save(run, 2)
        write_best(run, {"cycle": 2, "metric": "frechet_distance", "value": 1.0})
        prune_checkpoints(run, keep)

    return action


@pytest.mark.parametrize("save", [save, save_parts])
@pytest.mark.parametrize("keep", [1, 2])
def test_every_moment_of_saving_and_pruning_leaves_a_checkpoint_that_loads(
    tmp_path, keep, save
) -> None:
    run = tmp_path / "run"
    states = states_during(run, tmp_path / "copies", start_of_run(run, keep, save))
    newest = [assert_loads(state) for state in states]
    assert newest == sorted(newest)
    assert set(newest) == {1, 2}
    names = [{p.name for p in checkpoints_directory(state).iterdir()} for state in states]
    whole = {"cycle_000001", "cycle_000002", "best.json"}
    assert sum(bool(found - whole) for found in names) > 8
    # Pruning is among the moments: the manifest goes first.
    half = [s for s in states if (s / "checkpoints/cycle_000001/tensors").exists()]
    assert (len(half) < len(states)) == (keep == 1)
    for state in states:
        assert_next_save_cleans_up(state)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_process_that_is_killed_leaves_a_checkpoint_that_loads(tmp_path, keep) -> None:
    lines = traced(lambda count: None, start_of_run(tmp_path / "count", keep))
    assert lines > 100
    found = []
    for k in range(8):
        run = tmp_path / str(k)
        kill_at(1 + k * (lines - 1) // 7, start_of_run(run, keep))
        found.append(assert_loads(run))
        assert_next_save_cleans_up(run)
    assert found[0] == 1
    assert found[-1] == 2


def test_every_moment_of_replacing_a_damaged_checkpoint(tmp_path) -> None:
    run = tmp_path / "run"
    save(run, 1)
    (save(run, 2) / "state.json").unlink()
    states = states_during(run, tmp_path / "copies", lambda: save(run, 2))
    for state in states:
        latest = latest_checkpoint(state)
        if latest.name == "cycle_000002" and not (latest / "state.json").exists():
            with pytest.raises(UserError, match=r"lacks state\.json"):
                load_checkpoint(latest)
        else:
            assert_holds(load_checkpoint(latest), int(latest.name[-6:]))
    assert latest.name == "cycle_000002"


# Disks that are full or cannot be written.


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_a_disk_that_is_full_when_a_draft_is_published_publishes_nothing(mount) -> None:
    disk = mount("size=400k")
    save_parts(disk, 1)
    before = free_bytes(disk)
    given = state(2)
    draft = open_draft(disk, 2, ["critic"])
    written = write_part(draft, "critic", given, tensor_paths(given))
    (disk / "filler").write_bytes(b"x" * free_bytes(disk))
    with pytest.raises(UserError, match="cycle_000002 could not be written: no space is left"):
        publish_draft(draft, plain_state(given), written, DOCUMENTS)
    assert listing(disk) == ["cycle_000001"]
    (disk / "filler").unlink()
    assert free_bytes(disk) == before
    assert_holds(load_checkpoint(save_parts(disk, 2)), 2)


@pytest.mark.parametrize("pages", range(10))
def test_a_full_disk_publishes_nothing(mount, pages) -> None:
    disk = mount("size=400k")
    run = disk / "run"
    save(run, 1)
    size = 2000
    filler = disk / "filler"
    filler.write_bytes(b"x" * (free_bytes(disk) - pages * os.sysconf("SC_PAGE_SIZE")))
    before = free_bytes(disk)
    with pytest.raises(UserError) as error:
        save(run, 2, size=size)
    assert "no space is left on the device" in str(error.value)
    assert "cycle_000002" in str(error.value)
    assert listing(run) == ["cycle_000001"]
    assert free_bytes(disk) == before
    assert_holds(load_checkpoint(latest_checkpoint(run)), 1)
    # And when there is room again, the run can go on.
    filler.unlink()
    assert_holds(load_checkpoint(save(run, 2, size=size)), 2, size)


def test_a_disk_without_inodes_publishes_nothing(mount) -> None:
    run = mount("nr_inodes=14") / "run"
    save(run, 1)
    with pytest.raises(UserError, match="no space is left"):
        save(run, 2)
    assert listing(run) == ["cycle_000001"]
    assert_holds(load_checkpoint(latest_checkpoint(run)), 1)


def test_a_read_only_disk_is_a_clear_error(mount) -> None:
    disk = mount("size=1m")
    save(disk / "run", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for action in (
        lambda: save(disk / "run", 2),
        lambda: write_best(disk / "run", {"cycle": 1, "metric": "recall", "value": 1.0}),
    ):
        with pytest.raises(UserError, match=r"could not be written: .*Read-only"):
            action()
    assert_holds(load_checkpoint(latest_checkpoint(disk / "run")), 1)


def test_a_path_below_a_file_is_a_clear_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cycle_000001 could not be written"):
        save(tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"counters": {"x": object()}}, TypeError),
        ({"networks": {"student": {"weight": torch.zeros(2, dtype=torch.complex128)}}}, KeyError),
    ],
)
def test_other_errors_are_not_hidden_and_leave_nothing_behind(tmp_path, part, error) -> None:
    save(tmp_path, 1)
    with pytest.raises(error):
        save_checkpoint(tmp_path, 2, {**state(1), **part}, DOCUMENTS)
    assert listing(tmp_path) == ["cycle_000001"]


def test_the_manifest_lists_every_file(tmp_path) -> None:
    path = save(tmp_path, 1)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(listed) == sorted(FILES)
    for name, entry in listed.items():
        assert entry["size"] == (path / name).stat().st_size
        assert len(entry["sha256"]) == 64


# In the background.


def saver_of(run: Path, keep: int = 2) -> Saver:
    return Saver(run, CheckpointSettings(asynchronous=True, keep=keep))


def test_a_save_in_the_background_holds_the_state_at_the_time(tmp_path, monkeypatch) -> None:
    original, go_on = filesystem.FileSystem.create_stream, threading.Event()

    def wait_and_open(*arguments: Any) -> Any:
        assert go_on.wait(20)
        return original(*arguments)

    monkeypatch.setattr(filesystem.FileSystem, "create_stream", wait_and_open)
    given, saver = state(1), saver_of(tmp_path)
    saver.save(1, given, DOCUMENTS)
    for section in ("networks", "optimizers"):
        for values in given[section].values():
            for tensor in values.values():
                tensor.fill_(7)
    given["counters"]["student"] = 7
    saver.poll()
    assert listing(tmp_path) == [".cycle_000001.tmp"]
    go_on.set()
    saver.finish()
    saver.close()
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)


def test_a_save_in_the_background_that_fails_is_an_error_later_and_loses_nothing(
    tmp_path, monkeypatch
) -> None:
    saver = saver_of(tmp_path, keep=1)
    saver.save(1, state(1), DOCUMENTS)
    saver.finish()
    write_best(tmp_path, {"cycle": 1, "metric": "recall", "value": 0.5})

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem.FileSystem, "create_stream", full)
        saver.save(2, state(2), DOCUMENTS)
        saver.name_best({"cycle": 2, "metric": "recall", "value": 0.7})
        wait_for(lambda: not (tmp_path / "checkpoints/.cycle_000002.tmp").exists())
        with pytest.raises(UserError, match=r"cycle_000002 could not be written: no space"):
            poll_until_it_fails(saver)
    saver.poll()
    assert listing(tmp_path) == ["best.json", "cycle_000001"]
    assert read_best(tmp_path) == {"cycle": 1, "metric": "recall", "value": 0.5}
    saver.save(3, state(3), DOCUMENTS)
    saver.finish()
    saver.close()
    assert listing(tmp_path) == ["best.json", "cycle_000001", "cycle_000003"]


def poll_until_it_fails(saver: Saver) -> None:
    wait_for(lambda: saver.poll() is not None)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_is_killed_while_it_saves_in_the_background(tmp_path) -> None:
    save(tmp_path, 1)
    child = os.fork()
    if child == 0:
        try:
            filesystem.FileSystem.create_stream = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            saver_of(tmp_path).save(2, state(2), DOCUMENTS)
            time.sleep(20)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert listing(tmp_path) == [".cycle_000002.tmp", "cycle_000001"]
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)
    save(tmp_path, 3)
    assert listing(tmp_path) == ["cycle_000001", "cycle_000003"]


def test_every_moment_of_publishing_what_was_saved_in_the_background(tmp_path) -> None:
    run = tmp_path / "run"
    start_of_run(run, keep=1)
    saver = saver_of(run, keep=1)
    saver.save(2, state(2), DOCUMENTS)
    saver.name_best({"cycle": 2, "metric": "frechet_distance", "value": 1.0})
    states = states_during(run, tmp_path / "copies", saver.finish)
    saver.close()
    newest = [assert_loads(found) for found in states]
    assert newest == sorted(newest)
    assert set(newest) == {1, 2}
    assert listing(run) == ["best.json", "cycle_000002"]


def test_the_end_of_a_run_publishes_what_is_being_written(make_recipe, tmp_path) -> None:
    run = train(make_recipe("dmd2", {"checkpoint.asynchronous": True}))
    expected = [f"cycle_{c:06d}" for c in (4, 9)]
    with CheckpointHook(1000, RunSaves(run), alone=True) as hook:
        hook.after_cycle(4, [])
        hook.save_best(9, {"cycle": 9, "metric": "recall", "value": 0.5})
    assert listing(run.directory) == ["best.json", *expected]
    for error in (ZeroDivisionError, KeyboardInterrupt):
        hook = CheckpointHook(1000, RunSaves(run), alone=True)

        def fail(hook: CheckpointHook = hook, error: type[BaseException] = error) -> None:
            with hook:
                hook.save(11)
                raise error

        with pytest.raises(error):
            fail()
        # One process alone has nobody to wait for: what it saved before it failed is kept.
        assert latest_checkpoint(run.directory).name == "cycle_000011"
        shutil.rmtree(latest_checkpoint(run.directory))
