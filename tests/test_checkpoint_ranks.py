"""Checkpoints of several ranks: real processes that talk through gloo."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fewstep import files
from fewstep.checkpoint import (
    CheckpointSettings,
    Saver,
    checkpoints_directory,
    divide,
    latest_checkpoint,
    load_checkpoint,
    merge_states,
    open_draft,
    plain_state,
    publish_draft,
    read_best,
    read_manifest,
    save_checkpoint,
    tensor_paths,
    write_part,
)
from fewstep.errors import UserError
from fewstep.parallel.ranks import CPU, Ranks

DOCUMENTS = {"recipe.yaml": "seed: 1\n"}
BEHIND = CheckpointSettings(asynchronous=True, keep=2)
# Cut evenly, unevenly, and so that ranks get nothing.
SHAPES = {"even": (4, 3), "uneven": (5, 2, 2), "single": (1, 4), "vector": (3,), "empty": (0, 2)}

Action = Callable[[Ranks], Any]


def on_ranks(directory: Path, action: Action, size: int = 2) -> list[Any]:
    """What an action gives on every rank of a new group of processes."""
    store = directory / f"store-{uuid.uuid4().hex}"
    # Forked: they need not import torch again, and the action may be a closure.
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run(rank: int) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=30),
        )
        try:
            results.put((rank, action(Ranks(rank, size, CPU, grouped=True)), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
        os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        found = {rank: (value, error) for rank, value, error in (results.get() for _ in processes)}
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    for rank, (_, error) in found.items():
        assert error is None, f"rank {rank}: {error}"
    return [found[rank][0] for rank in range(size)]


def whole_tensors(cycle: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(cycle)
    found = {k: torch.randn(shape, generator=generator) for k, shape in SHAPES.items()}
    return {**found, "half": found["even"].bfloat16(), "blocks.0/weight": found["vector"] * 2}


def whole_state(cycle: int) -> dict[str, Any]:
    tensors = whole_tensors(cycle)
    return {
        "networks": {"student": tensors, "ema": {k: -v for k, v in tensors.items()}},
        "optimizers": {"student": {"even/step": torch.tensor(float(cycle))}, "fake_score": {}},
        "counters": {"student": cycle},
    }


def spread(state: dict[str, Any], size: int, cut: Any = None) -> dict[str, Any]:
    """The networks of a state as DTensors; the rest whole on every rank."""
    mesh = init_device_mesh("cpu", (size,))
    networks = {
        name: {
            k: distribute_tensor(v, mesh, [cut or Shard(0)], src_data_rank=None)
            for k, v in tensors.items()
        }
        for name, tensors in state["networks"].items()
    }
    return {**state, "networks": networks}


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {
        section: {
            name: {k: torch.zeros_like(v) for k, v in tensors.items()}
            for name, tensors in state[section].items()
        }
        for section in ("networks", "optimizers")
    }


def assert_holds(loaded: dict[str, Any], cycle: int) -> None:
    expected = whole_state(cycle)
    assert loaded["counters"] == expected["counters"]
    assert loaded["cycle"] == cycle
    for section in ("networks", "optimizers"):
        assert loaded[section].keys() == expected[section].keys()
        for name, tensors in expected[section].items():
            assert loaded[section][name].keys() == tensors.keys()
            for key, value in tensors.items():
                found = loaded[section][name][key]
                found = found.full_tensor() if isinstance(found, DTensor) else found
                assert found.dtype == value.dtype
                assert torch.equal(found, value), (section, name, key)


def listing(run: Path) -> list[str]:
    return sorted(p.name for p in checkpoints_directory(run).iterdir())


def caught(action: Callable[[], Any]) -> str:
    """The error that an action raises, in words."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# Any number of ranks, cut in any way.


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_many_ranks_are_read_by_one_process(tmp_path, size) -> None:
    def action(ranks: Ranks) -> tuple[Path, set[str]]:
        hashed = []

        def describe(file: Path) -> files.FileEntry:
            hashed.append(file.name.split("-")[1])
            return files.describe_file(file)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fewstep.checkpoint.tensors.describe_file", describe)
            path = save_checkpoint(tmp_path, 1, spread(whole_state(1), size), DOCUMENTS, ranks)
        return path, set(hashed)

    path = tmp_path / "checkpoints/cycle_000001"
    # Each has written and hashed files of its own.
    assert on_ranks(tmp_path, action, size) == [(path, {f"{r + 1:05d}"}) for r in range(size)]
    assert listing(tmp_path) == ["cycle_000001"]
    assert_holds(load_checkpoint(path), 1)
    written = {f.split("-")[1] for f in read_manifest(path) or {} if f.startswith("tensors/")}
    assert written == {f"{rank:05d}" for rank in range(1, size + 1)}


@pytest.mark.parametrize("cut", [Shard(0), Shard(1), Replicate()])
def test_what_one_process_saved_is_read_into_any_shards(tmp_path, cut) -> None:
    state = whole_state(1)
    if isinstance(cut, Shard) and cut.dim == 1:
        for tensors in state["networks"].values():
            for key in ("vector", "blocks.0/weight"):
                del tensors[key]
    path = save_checkpoint(tmp_path, 1, state, DOCUMENTS)

    def action(ranks: Ranks) -> None:
        target = spread(zeros(state), 2, cut)
        names: dict[str, Any] = {}

        def into(optimizers: Any) -> dict[str, Any]:
            names.update(optimizers)
            return target

        loaded = load_checkpoint(path, into, ranks)
        assert names == {"student": ["even/step"], "fake_score": []}
        for name, tensors in state["networks"].items():
            for key, value in tensors.items():
                # Read in place.
                assert loaded["networks"][name][key] is target["networks"][name][key]
                assert torch.equal(loaded["networks"][name][key].full_tensor(), value)

    on_ranks(tmp_path, action)


def test_two_ranks_to_three_and_back_to_two(tmp_path) -> None:
    def first(ranks: Ranks) -> None:
        save_checkpoint(tmp_path, 1, spread(whole_state(1), 2), DOCUMENTS, ranks)

    def again(size: int) -> Action:
        def action(ranks: Ranks) -> None:
            path = latest_checkpoint(tmp_path)
            loaded = load_checkpoint(path, lambda _: spread(zeros(whole_state(1)), size), ranks)
            assert_holds(loaded, 1)
            save_checkpoint(tmp_path, 1, loaded, DOCUMENTS, ranks)

        return action

    on_ranks(tmp_path, first)
    on_ranks(tmp_path, again(3), 3)
    on_ranks(tmp_path, again(2))
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)


def test_what_all_ranks_hold_alike_is_written_once(tmp_path) -> None:
    on_ranks(tmp_path, lambda ranks: save_checkpoint(tmp_path, 1, whole_state(1), {}, ranks) and 0)
    keys: list[str] = []
    for file in (tmp_path / "checkpoints/cycle_000001/tensors").iterdir():
        with safe_open(file, "pt") as content:
            keys += content.keys()
    assert len(keys) == len(set(keys)) == 2 * len(whole_tensors(1)) + 1
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)


def test_what_does_not_fit_is_named_on_every_rank(tmp_path) -> None:
    path = save_checkpoint(tmp_path, 1, whole_state(1), DOCUMENTS)

    def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        target = zeros(whole_state(1))
        change(target["networks"])
        return target

    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "missing none, left over ema": lambda n: n.pop("ema"),
        "missing teacher": lambda n: n.update(teacher={}),
        "tensors of network student .*left over even": lambda n: n["student"].pop("even"),
        "tensors of network ema .*missing more": lambda n: n["ema"].update(more=torch.zeros(1)),
        r"even of network ema has shape \(4, 3\), the run needs \(3, 4\)": lambda n: n[
            "ema"
        ].update(even=torch.zeros(3, 4)),
    }

    def action(ranks: Ranks) -> list[str]:
        return [
            caught(lambda c=change: load_checkpoint(path, lambda _: changed(c), ranks))
            for change in changes.values()
        ]

    for errors in on_ranks(tmp_path, action):
        for pattern, error in zip(changes, errors, strict=True):
            with pytest.raises(UserError, match=pattern):
                raise UserError(error)


def test_damage_is_named_on_every_rank(tmp_path) -> None:
    def save(ranks: Ranks) -> None:
        save_checkpoint(tmp_path, 1, spread(whole_state(1), 2), DOCUMENTS, ranks)

    on_ranks(tmp_path, save)
    path = latest_checkpoint(tmp_path)
    names = sorted(read_manifest(path) or {})
    assert len(names) == 7

    def action(ranks: Ranks) -> list[str]:
        found = []
        for name in names:
            content = (path / name).read_bytes()
            ranks.barrier()
            if ranks.first:
                (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            ranks.barrier()
            found.append(caught(lambda: load_checkpoint(path, None, ranks)))
            ranks.barrier()
            if ranks.first:
                (path / name).write_bytes(content)
        ranks.barrier()
        assert_holds(load_checkpoint(path, None, ranks), 1)
        return found

    first, second = on_ranks(tmp_path, action)
    assert first == second
    for name, error in zip(names, first, strict=True):
        assert f"{path / name} is damaged" in error


# Several groups, each with ranks of its own.


def part_of(state: dict[str, Any], network: str) -> dict[str, Any]:
    """The state of a group that holds one network, and a base that all groups hold."""
    optimizers = {"student": state["optimizers"]["student"]} if network == "student" else {}
    return {
        "networks": {"base": whole_tensors(7), network: state["networks"][network]},
        "optimizers": optimizers,
        "counters": {"roles": {network: {"attempted": 1}}, "ema_updates": 0},
    }


PARTS = {"critic": ("ema", 2), "actor": ("student", 3)}


def save_groups(run: Path, cycle: int, action: Any = write_part) -> tuple[Path, dict[str, Any]]:
    """A draft, and of each group what its ranks have given for their part; as a driver does it."""
    states = {g: part_of(whole_state(cycle), network) for g, (network, _) in PARTS.items()}
    shares = divide({group: tensor_paths(state) for group, state in states.items()})
    draft = open_draft(run, cycle, list(PARTS))
    found = {}
    for group, (_, size) in PARTS.items():

        def write(ranks: Ranks, group: str = group) -> Any:
            state = spread(states[group], ranks.size)
            return action(draft, group, state, shares[group], ranks)

        found[group] = on_ranks(run, write, size)
    return draft, found


def test_two_groups_of_ranks_write_one_checkpoint(tmp_path) -> None:
    draft, found = save_groups(tmp_path, 1)
    files: dict[str, files.FileEntry] = {}
    for group, (_, size) in PARTS.items():
        # Every rank knows the files of all ranks of its group, and of no other.
        assert all(mine == found[group][0] for mine in found[group])
        names = {Path(name).parent / Path(name).name.split("-")[1] for name in found[group][0]}
        assert names == {Path(f"tensors/{group}/{rank + 1:05d}") for rank in range(size)}
        files.update(found[group][0])
    states = {g: part_of(whole_state(1), network) for g, (network, _) in PARTS.items()}
    merged = merge_states([plain_state(state) for state in states.values()])
    path = publish_draft(draft, merged, files, DOCUMENTS)
    assert list(load_checkpoint(path)["networks"]) == ["base", "ema", "student"]
    expected = {"base": whole_tensors(7), **whole_state(1)["networks"]}

    def read(ranks: Ranks, names: tuple[str, ...]) -> None:
        wanted = {name: expected[name] for name in names}
        target = spread(zeros({"networks": wanted, "optimizers": {}}), ranks.size)
        loaded = load_checkpoint(path, lambda _: target, ranks, partial=True)
        for name, tensors in wanted.items():
            for key, value in tensors.items():
                assert torch.equal(loaded["networks"][name][key].full_tensor(), value)

    # Two groups, cut in other ways, and all of it by one.
    on_ranks(tmp_path, lambda ranks: read(ranks, ("base", "ema")), 3)
    on_ranks(tmp_path, lambda ranks: read(ranks, ("base", "student")))
    on_ranks(tmp_path, lambda ranks: read(ranks, ("base", "student", "ema")))
    for name, tensors in load_checkpoint(path)["networks"].items():
        assert all(torch.equal(tensors[key], value) for key, value in expected[name].items())


def test_a_part_that_fails_on_one_rank_fails_on_all_of_its_group(tmp_path) -> None:
    save_checkpoint(tmp_path, 1, whole_state(1), DOCUMENTS)

    def action(draft: Path, group: str, state: Any, share: Any, ranks: Ranks) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if (group, ranks.rank) == ("critic", 1):
                break_stream(patch)
            return caught(lambda: write_part(draft, group, state, share, ranks))

    draft, found = save_groups(tmp_path, 2, action)
    assert len(set(found["critic"])) == 1
    assert "cycle_000002 could not be written: rank 1: no space is left" in found["critic"][0]
    # The other group was not disturbed, and nothing was published.
    assert set(found["actor"]) == {"none"}
    assert draft.is_dir()
    assert latest_checkpoint(tmp_path).name == "cycle_000001"


# What fails on one rank is an error on all.


def break_stream(patch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(filesystem.FileSystem, "create_stream", full)


def break_sync(patch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    patch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("breaking", "reason"),
    [(break_stream, "no space is left on the device"), (break_sync, "Input/output error")],
)
def test_a_disk_that_fails_on_one_rank_is_an_error_on_all(
    tmp_path, rank, breaking, reason, behind
) -> None:
    def action(ranks: Ranks) -> tuple[str, list[str]]:
        saver = Saver(tmp_path, BEHIND.model_copy(update={"asynchronous": behind}), ranks)
        state = spread(whole_state(1), 2)
        saver.save(1, state, DOCUMENTS)
        saver.finish()

        def save() -> None:
            saver.save(2, state, DOCUMENTS)
            saver.finish()

        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == rank:
                breaking(patch)
            error = caught(save)
        left = listing(tmp_path)
        ranks.barrier()
        # And nobody is out of step: the next one is as good as ever.
        saver.save(3, spread(whole_state(3), 2), DOCUMENTS)
        saver.finish()
        saver.close()
        return error, left

    found = on_ranks(tmp_path, action)
    assert found[0] == found[1]
    assert found[0][0].startswith("UserError: ")
    assert f"cycle_000002 could not be written: rank {rank}: " in found[0][0]
    assert reason in found[0][0]
    assert found[0][1] == ["cycle_000001"]
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 3)


def test_a_rename_that_fails_is_an_error_on_all(tmp_path) -> None:
    def action(ranks: Ranks) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if ranks.first:
                patch.setattr(os, "rename", os.mkdir)
            return caught(lambda: save_checkpoint(tmp_path, 1, whole_state(1), {}, ranks))

    first, second = on_ranks(tmp_path, action)
    assert first.startswith("TypeError")
    assert second.startswith("TrainingError: rank 0: TypeError")
    assert listing(tmp_path) == []


def test_a_tensor_that_cannot_be_saved_on_one_rank_is_an_error_on_all(tmp_path) -> None:
    def action(ranks: Ranks) -> str:
        state = whole_state(1)
        kind = torch.complex128 if ranks.rank == 1 else torch.float32
        # Of a name of its own: a tensor that both hold would be written by one of them.
        state["networks"]["student"][f"own.{ranks.rank}"] = torch.zeros(2, dtype=kind)
        return caught(lambda: save_checkpoint(tmp_path, 1, state, {}, ranks))

    first, second = on_ranks(tmp_path, action)
    assert first.startswith("TrainingError: rank 1: KeyError")
    assert second.startswith("KeyError")
    assert listing(tmp_path) == []


def test_a_disk_that_is_not_shared_is_an_error(tmp_path) -> None:
    def action(ranks: Ranks) -> str:
        run = tmp_path / str(ranks.rank)
        return caught(lambda: save_checkpoint(run, 1, whole_state(1), {}, ranks))

    for error in on_ranks(tmp_path, action):
        assert "could not be written: rank 1: " in error
        assert "all ranks must share a disk" in error
    assert listing(tmp_path / "0") == []


# In the background.


class Gate:
    """Holds up what writes tensors until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        original = filesystem.FileSystem.create_stream

        def wait_and_open(*arguments: Any) -> Any:
            self.reached.set()
            assert self._open.wait(20)
            return original(*arguments)

        patch.setattr(filesystem.FileSystem, "create_stream", wait_and_open)

    def open(self) -> None:
        self._open.set()


def scramble(state: dict[str, Any]) -> None:
    for section in ("networks", "optimizers"):
        for tensors in state[section].values():
            for tensor in tensors.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)


def test_what_is_saved_in_the_background_is_the_state_at_the_time(tmp_path) -> None:
    """Bit for bit, whatever training does to the tensors meanwhile."""

    def action(ranks: Ranks) -> None:
        state = spread(whole_state(1), 2)
        state["counters"] = {"student": 1}
        saver = Saver(tmp_path, BEHIND, ranks)
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            saver.save(1, state, DOCUMENTS)
            scramble(state)
            state["counters"]["student"] = 9
            saver.name_best({"cycle": 1, "metric": "recall", "value": 0.5})
            saver.poll()
            assert listing(tmp_path) == [".cycle_000001.tmp"]
            ranks.barrier()
            gate.open()
            saver.finish()
        saver.close()
        assert listing(tmp_path) == ["best.json", "cycle_000001"]

    on_ranks(tmp_path, action)
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)
    assert read_best(tmp_path) == {"cycle": 1, "metric": "recall", "value": 0.5}


@pytest.mark.parametrize("slow", [0, 1])
def test_it_is_published_when_all_have_written_their_part(tmp_path, slow) -> None:
    def action(ranks: Ranks) -> list[bool]:
        target = tmp_path / "checkpoints/cycle_000001"
        seen = []
        saver = Saver(tmp_path, BEHIND, ranks)
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            saver.save(1, spread(whole_state(1), 2), DOCUMENTS)
            if ranks.rank != slow:
                gate.open()
            for cycle in range(200):
                if cycle == 5:
                    gate.open()
                # What training does at the same time, through the run's own group.
                total = torch.full((100,), float(ranks.rank + cycle))
                dist.all_reduce(total)
                assert total.unique().tolist() == [2.0 * cycle + 1]
                saver.poll()
                seen.append(target.exists())
                ranks.barrier()
                if seen[-1]:
                    break
                time.sleep(0.01)
        saver.close()
        return seen

    first, second = on_ranks(tmp_path, action)
    assert first == second
    assert first[-1]
    assert len(first) > 5
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)


def test_the_next_save_waits_for_the_one_before(tmp_path) -> None:
    def action(ranks: Ranks) -> None:
        saver = Saver(tmp_path, BEHIND, ranks)
        for cycle in range(1, 5):
            saver.save(cycle, spread(whole_state(cycle), 2), DOCUMENTS)
            if cycle == 1:
                saver.name_best({"cycle": 1, "metric": "recall", "value": 0.5})
            ranks.barrier()
            assert (tmp_path / f"checkpoints/cycle_{cycle - 1:06d}").exists() == (cycle > 1)
            ranks.barrier()
        saver.finish()
        saver.close()

    on_ranks(tmp_path, action)
    assert listing(tmp_path) == ["best.json", "cycle_000001", "cycle_000003", "cycle_000004"]
    for cycle in (1, 3, 4):
        assert_holds(load_checkpoint(tmp_path / f"checkpoints/cycle_{cycle:06d}"), cycle)


@pytest.mark.parametrize("moment", ["writing", "written"])
def test_ranks_that_are_killed_while_they_save_leave_the_older_checkpoint(tmp_path, moment) -> None:
    context = multiprocessing.get_context("fork")
    ready = [context.Event() for _ in range(2)]

    def run(rank: int) -> None:
        ranks = Ranks(rank, 2, CPU, grouped=True)
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2
        )
        saver = Saver(tmp_path, BEHIND, ranks)
        saver.save(1, spread(whole_state(1), 2), DOCUMENTS)
        saver.finish()
        gate = Gate(pytest.MonkeyPatch())
        if moment == "written":
            gate.open()
        saver.save(2, spread(whole_state(2), 2), DOCUMENTS)
        assert gate.reached.wait(20)
        if moment == "written":
            assert saver._flight is not None
            saver._flight.files.result()
        ready[rank].set()
        time.sleep(60)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for event in ready:
        assert event.wait(30)
    for process in processes:
        process.kill()
        process.join()
    assert listing(tmp_path) == [".cycle_000002.tmp", "cycle_000001"]
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)
    save_checkpoint(tmp_path, 3, whole_state(3), DOCUMENTS)
    assert listing(tmp_path) == ["cycle_000001", "cycle_000003"]


def test_a_rank_that_dies_while_others_save_in_the_background_does_not_hang_them(tmp_path) -> None:
    def action(ranks: Ranks) -> str:
        saver = Saver(tmp_path, BEHIND, ranks)
        saver.save(1, spread(whole_state(1), 2), DOCUMENTS)
        saver.finish()
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            saver.save(2, spread(whole_state(2), 2), DOCUMENTS)
            assert gate.reached.wait(20)
            if ranks.rank == 1:
                return "gone"
            time.sleep(0.5)
            gate.open()
            return caught(saver.finish)

    first, second = on_ranks(tmp_path, action)
    assert second == "gone"
    assert first != "none"
    assert_holds(load_checkpoint(latest_checkpoint(tmp_path)), 1)


def test_a_run_that_has_failed_does_not_wait_for_a_rank_that_hangs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fewstep.checkpoint.saver.LAST_SECONDS", 0.2)

    def action(ranks: Ranks) -> float:
        saver = Saver(tmp_path, BEHIND, ranks)
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            saver.save(1, spread(whole_state(1), 2), DOCUMENTS)
            assert gate.reached.wait(20)
            ranks.barrier()
            if ranks.rank == 1:
                time.sleep(3)
                return 0.0
            gate.open()
            start = time.monotonic()
            saver.close()
            return time.monotonic() - start

    assert on_ranks(tmp_path, action)[0] < 2
