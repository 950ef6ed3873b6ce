"""Processes that raise, die or hang: the run says who it was, or goes on; and nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faulty
import psutil
import pytest
import ray
from faulty import Faulty
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

import fewstep
from fewstep.config import Recipe, dump_recipe
from fewstep.errors import TrainingError, UserError
from fewstep.launch.ray.calls import Call, RemoteTraceback, gather
from fewstep.launch.ray.cluster import Cluster, check_answers
from fewstep.launch.ray.driver import agree
from fewstep.launch.ray.group import TrainerGroup
from fewstep.launch.ray.pool import RolloutPool
from fewstep.launch.ray.underway import Sent, Underway
from fewstep.models.mixture import PointNetwork
from fewstep.models.module import ModuleModel
from fewstep.parallel.settings import LaunchSettings
from fewstep.placement import Placement, Seat
from fewstep.pretrained import resolve_recipe
from fewstep.training.phase import PhaseRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Networks that need neither diffusers nor PEFT, which take seconds to import in every process.
CHEAP: dict[str, Any] = {
    "model": {"family": "mixture", "width": faulty.WIDTH, "depth": faulty.DEPTH},
    "method.guidance": 1.0,
    "runtime.threads": 1,
}
RAY = {**CHEAP, "launch.kind": "ray"}
TWO_RANKS = {**RAY, "launch.processes": 2}
GROUPS = {"critic": ["fake_score", "teacher_score"], "actor": ["student", "student_ema"]}
FAKE_FIRST = {"cycle.order": "fake_score_first"}
SPLIT = {**RAY, **FAKE_FIRST, "placement.groups": GROUPS, "rollout.workers": 1}
# How long the end may take once the fault is noticed; the machine may be busy.
SECONDS = 30
PHASE = r"phase (student|fake_score/\d) \(role (student|fake_score)\)"
AssertAsAlone = Callable[[dict[str, Any], fewstep.Run], None]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Faulty]:
    """A model that fails where it is told to; workers get its class along with it."""
    ray.cloudpickle.register_pickle_by_value(faulty)
    yield Faulty(tmp_path)
    ray.cloudpickle.unregister_pickle_by_value(faulty)


@pytest.fixture
def assert_as_alone(
    make_recipe: Callable[..., Recipe], tmp_path: Path, flat_state: Any, assert_equal_states: Any
) -> AssertAsAlone:
    """Fail unless a run has come, bit for bit, to what it comes to in one process without Ray."""

    def check(changes: dict[str, Any], run: fewstep.Run) -> None:
        alone = make_recipe("dmd2", {**CHEAP, **changes, "run_dir": str(tmp_path / "alone")})
        assert_equal_states(flat_state(fewstep.train(alone)), flat_state(run))

    return check


@pytest.mark.parametrize(
    ("kind", "timeout_seconds", "says"),
    [
        ("raise", 200, rf"rank 1, cycle 3, {PHASE}: ValueError: this rank is broken"),
        ("kill", 200, rf"rank 1, cycle 3, {PHASE}: the process has died: .*connection error"),
        ("stop", 10, rf"rank 0, cycle 3, {PHASE}: trainer/1 did not answer within 10 s \(launch\."),
    ],
)
def test_a_broken_rank_ends_the_run(
    nothing_left: Any,
    make_recipe: Callable[..., Recipe],
    model: Faulty,
    tmp_path: Path,
    kind: str,
    timeout_seconds: int,
    says: str,
) -> None:
    recipe = make_recipe("dmd2", {**TWO_RANKS, "launch.timeout_seconds": timeout_seconds})
    with pytest.raises(TrainingError, match=f"^group trainer, {says}") as found:
        fewstep.train(recipe, model=model, on_cycle=model.arm_after(2, "trainer/1", kind))
    assert model.seconds("trainer/1") < SECONDS + (timeout_seconds if timeout_seconds < 100 else 0)
    if kind == "raise":
        assert isinstance(found.value.__cause__, RemoteTraceback)
        assert 'faulty.py", line' in str(found.value.__cause__)
    assert [d.name for d in (tmp_path / "run" / "checkpoints").iterdir()] == ["cycle_000002"]
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_rank_that_does_not_answer_after_the_others_is_named(nothing_left: Any) -> None:
    never = ray.remote(resources={"none such": 1})(lambda: None).remote()
    calls = [Call(ray.put(0), "trainer/0", "wake"), Call(never, "trainer/1", "wake")]
    says = r"^group trainer, rank 1, wake: trainer/1 did not answer within 0.5 s \(launch.timeout"
    with pytest.raises(TrainingError, match=says):
        gather(calls, patience_seconds=0.5)
    ray.cancel(never)


def test_a_rank_without_finite_numbers_makes_all_skip(
    nothing_left: Any, make_recipe: Callable[..., Recipe], model: Faulty
) -> None:
    updated: list[bool] = []
    counters: list[Any] = []

    def on_cycle(cycle: int, results: Any) -> None:
        updated.extend(result.updated for result in results)
        if cycle == 1:
            model.arm("trainer/1", "nan")
        if cycle == 3:
            names = ray.util.list_named_actors(all_namespaces=True)
            actors = [ray.get_actor(**name) for name in names]
            counters.extend(ray.get([a.__ray_call__.remote(counters_of) for a in actors]))

    def counters_of(process: Any) -> Any:
        return process._worker.state_dict()["counters"]

    recipe = make_recipe("dmd2", {**TWO_RANKS, "train.cycles": 3})
    fewstep.train(recipe, model=model, on_cycle=on_cycle)
    assert updated == [True] * 3 + [False] + [True] * 5
    assert len(counters) == 2
    assert counters[0] == counters[1]
    assert sum(role["skipped"] for role in counters[0]["roles"].values()) == 1


# Rollout workers.


def times_lost(caplog: pytest.LogCaptureFixture) -> int:
    """How often the run has said that it lost the first of them."""
    return sum("rollout/0 was lost" in record.getMessage() for record in caplog.records)


def test_lost_rollout_workers_are_replaced(
    nothing_left: Any,
    make_recipe: Callable[..., Recipe],
    model: Faulty,
    monkeypatch: pytest.MonkeyPatch,
    assert_as_alone: AssertAsAlone,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pending: list[str] = []
    deliver, sleep = RolloutPool.deliver, RolloutPool.sleep

    def kill() -> None:
        os.kill(model.pid("rollout/0"), signal.SIGKILL)

    def deliver_(self: RolloutPool, push: Any, *what: int) -> None:
        def push_(take: Any) -> Any:
            def take_(portion: Any) -> None:
                take(portion)
                if "weights" in pending:
                    pending.remove("weights")
                    kill()

            return push(take_)

        deliver(self, push_, *what)

    def sleep_(self: RolloutPool, cycle: int) -> None:
        sleep(self, cycle)
        if "asleep" in pending:
            pending.remove("asleep")
            kill()

    def on_cycle(cycle: int, _: Any) -> None:
        if cycle == 1:
            model.arm("rollout/0", "kill")
        if cycle == 2:
            kill()
        if cycle in (3, 4):
            pending.append("weights" if cycle == 3 else "asleep")

    monkeypatch.setattr(RolloutPool, "deliver", deliver_)
    monkeypatch.setattr(RolloutPool, "sleep", sleep_)
    changes = {**FAKE_FIRST, "train.cycles": 6, "checkpoint.every": 6}
    recipe = make_recipe("dmd2", {**SPLIT, **changes, "placement.offload": True})
    run = fewstep.train(recipe, model=model, on_cycle=on_cycle)
    assert pending == []
    assert times_lost(caplog) == 4, caplog.text
    assert_as_alone(changes, run)


@pytest.mark.exhaustive
def test_rollout_workers_that_die_while_the_student_trains_are_replaced(
    nothing_left: Any,
    make_recipe: Callable[..., Recipe],
    model: Faulty,
    monkeypatch: pytest.MonkeyPatch,
    assert_as_alone: AssertAsAlone,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_phase = TrainerGroup.run_phase

    def run_phase_(self: TrainerGroup, request: PhaseRequest, *rest: Any) -> Sent:
        sent = run_phase(self, request, *rest)
        if request.role == "student" and request.cycle in (2, 3):
            os.kill(model.pid("rollout/0"), signal.SIGKILL)  # before the push is sent
        return sent

    monkeypatch.setattr(TrainerGroup, "run_phase", run_phase_)
    changes = {**FAKE_FIRST, "train.cycles": 4}
    run = fewstep.train(make_recipe("dmd2", {**SPLIT, **changes}), model=model)
    assert times_lost(caplog) == 2, caplog.text
    assert_as_alone(changes, run)


@pytest.mark.exhaustive
def test_a_broken_rank_of_the_actor_ends_the_run_though_a_push_was_sent_along(
    nothing_left: Any, make_recipe: Callable[..., Recipe], model: Faulty
) -> None:
    recipe = make_recipe("dmd2", {**SPLIT, "launch.processes": 2})
    says = "^group actor, rank 1, cycle 3, phase student .*: ValueError: this rank is broken"
    with pytest.raises(TrainingError, match=says):
        fewstep.train(recipe, model=model, on_cycle=model.arm_after(2, "actor/1", "raise"))
    assert model.seconds("actor/1") < SECONDS


@pytest.mark.exhaustive
def test_a_rollout_worker_that_dies_again_and_again_ends_the_run(
    nothing_left: Any, make_recipe: Callable[..., Recipe], model: Faulty
) -> None:
    recipe = make_recipe("dmd2", {**RAY, "rollout.workers": 1})
    says = (
        r"rollout: workers were lost 3 times in a row at the samples of cycle 3, fake_score/0; the "
        r"last: rollout/0: the process has died"
    )
    with pytest.raises(TrainingError, match=says):
        fewstep.train(recipe, model=model, on_cycle=model.arm_after(2, "rollout/0", "kill again"))


# The command, and its end.


@dataclass
class Started:
    """A command that trains."""

    process: subprocess.Popen[str]
    run_dir: Path

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait while it runs."""
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def wait_for_cycle(self) -> None:
        """Wait until the first cycle is done."""
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and '"fake_score"' in metrics.read_text())

    def family(self) -> list[psutil.Process]:
        """Itself, and all that it has started."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def watch(self) -> list[psutil.Process]:
        """All that it has started until its end, once that has come."""
        found: dict[int, psutil.Process] = {}
        while self.process.poll() is None:
            with contextlib.suppress(psutil.Error):
                found |= {process.pid: process for process in self.family()}
            time.sleep(0.1)
        return list(found.values())

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@pytest.fixture
def start(make_recipe: Callable[..., Recipe], model: Faulty, tmp_path: Path) -> Iterator[Any]:
    """Start `fewstep train` with the faulty model."""
    started: list[Started] = []

    def begin(changes: dict[str, Any], *words: str, **environment: str) -> Started:
        file = tmp_path / "recipe.yaml"
        file.write_text(dump_recipe(make_recipe("dmd2", changes)))
        process = subprocess.Popen(
            [sys.executable, str(Path(faulty.__file__)), "train", str(file), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "300", "FAULTY": str(tmp_path), "ARM": "", **environment},
        )
        started.append(Started(process, tmp_path / "run"))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


LONG = {"train.cycles": 100000, "checkpoint.every": 100000}


def assert_gone(family: list[psutil.Process]) -> None:
    """None of these processes is there any more, or will be in some seconds."""
    _, alive = psutil.wait_procs(family, timeout=SECONDS)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_the_command_prints_the_remote_traceback_and_the_place(
    start: Any, model: Faulty, tmp_path: Path
) -> None:
    started = start({**SPLIT, **LONG}, ARM="2 critic/0 raise")
    family = started.watch()
    code, out, err = started.end()
    assert code == 1
    traceback, _, last = err.rpartition("\nError: ")
    assert traceback.startswith("in critic/0:\n")
    assert "\x1b" not in traceback
    assert "in forward" in traceback
    assert re.fullmatch(
        rf"group critic, rank 0, cycle 3, {PHASE}: ValueError: this rank is broken\n",
        last,
    ), err
    assert "Complete" not in out
    assert_gone(family)


@pytest.mark.exhaustive
def test_a_killed_driver_takes_all_along_and_its_run_can_be_resumed(
    start: Any, model: Faulty, tmp_path: Path, assert_as_alone: AssertAsAlone
) -> None:
    changes = {**FAKE_FIRST, "train.cycles": 5, "checkpoint.every": 2}
    started = start({**SPLIT, **changes}, ARM="3 critic/0 spin")
    started.wait_for(lambda: (tmp_path / "done" / "critic-0").exists())
    family = started.family()
    names = {p.pid: p.name() for p in family}
    assert {"gcs_server", "raylet"} <= set(names.values())
    assert sum(name.startswith("ray::") for name in names.values()) > 3
    started.process.kill()
    # Ray's agents, which hold nothing of the run, first try for a minute or two to tell that the
    # rest of Ray has gone to just that.
    assert_gone([p for p in family if not names[p.pid].endswith("Agent")])
    # Ports that Ray has by default are taken, and what an earlier cluster has left is in the way.
    with taken_ports(6379, 8265, 10001) as port, stale_cluster() as folder:
        environment = {"MASTER_PORT": str(port), "RAY_ADDRESS": f"127.0.0.1:{port}"}
        resumed = start({**SPLIT, **changes}, "--resume", RAY_TMPDIR=folder, **environment)
        code, out, err = resumed.end()
    assert (code, err) == (0, ""), err
    assert "Complete: 5 cycles" in out
    assert_as_alone(changes, fewstep.open_run(tmp_path / "run"))


@contextmanager
def taken_ports(*ports: int) -> Iterator[int]:
    """Take these ports, unless they are taken already, and one more, which is given."""
    with contextlib.ExitStack() as stack:
        for port in (*ports, 0):
            taken = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("", port))
                taken.listen()
        yield taken.getsockname()[1]


@contextmanager
def stale_cluster() -> Iterator[str]:
    """A folder for Ray's sessions that a cluster has left without tidying up."""
    # Short, as sockets' names must be.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        yield folder


def test_a_killed_driver_gives_back_what_it_has_on_a_cluster(nothing_left: Any, start: Any) -> None:
    address = ray.get_runtime_context().gcs_address
    started = start({**RAY, **LONG, "launch.address": address})
    started.wait_for_cycle()
    assert set(nothing_left()) == {"actors", "groups", "taken", "processes"}
    started.process.kill()
    begin = time.monotonic()
    while nothing_left():
        assert time.monotonic() - begin < SECONDS
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "code", "own_cluster"),
    [
        pytest.param(signal.SIGINT, 130, True, id="interrupted"),
        pytest.param(signal.SIGTERM, 143, False, id="preempted", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_lets_the_cycle_finish_and_saves(
    nothing_left: Any, start: Any, tmp_path: Path, number: int, code: int, own_cluster: bool
) -> None:
    address = None if own_cluster else ray.get_runtime_context().gcs_address
    started = start({**RAY, **LONG, "launch.address": address})
    started.wait_for_cycle()
    family = started.family()
    os.killpg(started.process.pid, number)  # as a terminal does, and schedulers
    found, out, err = started.end()
    assert (found, err) == (code, ""), err
    cycle = int(out.partition("Stopped and saved after cycle ")[2].partition(".")[0])
    assert fewstep.open_run(tmp_path / "run").cycle == cycle >= 1
    assert_gone(family)


# Places.


def test_more_workers_than_accelerators_are_refused(
    nothing_left: Any, make_recipe: Callable[..., Recipe]
) -> None:
    recipe = make_recipe("dmd2", {**RAY, "launch.processes": 3})
    with pytest.raises(UserError, match=r"^launch.processes: 3 workers .* has 2 of them \(\S+ 2\)"):
        fewstep.train(recipe)
    assert nothing_left() == {}
    assert not Path(recipe.run_dir).exists()


def test_places_that_another_job_has_are_waited_for_so_long(
    nothing_left: Any, make_recipe: Callable[..., Recipe]
) -> None:
    other = placement_group([{"accelerator": 1}] * 2)
    assert other.wait(30)
    try:
        recipe = make_recipe("dmd2", {**TWO_RANKS, "placement.timeout_seconds": 1})
        says = r"^placement: no place for trainer/0, trainer/1 within 1 s .*2 x 'accelerator' are"
        with pytest.raises(UserError, match=says):
            fewstep.train(recipe)
        table = placement_group_table()
        waiting = {key for key, group in table.items() if group["state"] != "REMOVED"}
        assert waiting == {other.id.hex()}
    finally:
        remove_placement_group(other)


def test_a_process_without_room_in_its_bundle_is_named(nothing_left: Any, model: Faulty) -> None:
    seats = [Seat("trainer", group, 0, 0, 6000) for group in ("first", "second")]
    placement = Placement("accelerator", 1, {"first": (), "second": ()}, tuple(seats))
    launch, says = LaunchSettings(kind="ray"), r"second/0 got no place within 2 s .* needs 0.6 of"
    with Cluster(launch, placement, timeout_seconds=120) as cluster:
        cluster.start(faulty.Idle, seats[:1], lambda seat: ())
        cluster._timeout = 2
        with pytest.raises(UserError, match=says):
            cluster.start(faulty.Idle, seats[1:2], lambda seat: ())


# Clusters that are not there.


def test_a_cluster_that_is_not_there_is_said_to_be(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken_ports() as port:
        free = f"127.0.0.1:{port}"
    for name in ("RAY_ADDRESS", "TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    says = r"^launch.address: no Ray cluster answers at {}.*refused.*launch.address=null"
    with pytest.raises(UserError, match=says.format(free)):
        check_answers(free)
    with pytest.raises(UserError, match=r"^launch.address: 'somewhere' is given; it should be"):
        check_answers("somewhere")
    with stale_cluster() as folder, monkeypatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        with pytest.raises(UserError, match=says.format(f"127.0.0.1:1 .*{folder}/ray/ray_curr")):
            check_answers("auto")
    code, _, err = start({**RAY, "launch.address": "auto"}, RAY_ADDRESS=free).end()
    assert code == 2
    assert re.match("Error: " + says.format(free + " .*RAY_ADDRESS")[1:], err), err
    assert err.count("\n") == 1


# Several runs.


def test_two_runs_share_a_cluster_but_not_a_directory(
    nothing_left: Any, make_recipe: Callable[..., Recipe], model: Faulty, tmp_path: Path
) -> None:
    together, refused = threading.Barrier(2, timeout=120), list[UserError]()
    runs: dict[str, Any] = {}

    def train(name: str) -> None:
        def on_cycle(cycle: int, _: Any) -> None:
            if cycle == 1:
                together.wait()  # both are there
                if name == "one":
                    with pytest.raises(UserError, match=r"run_dir: .* is in use") as found:
                        fewstep.train(recipe, model=model)
                    refused.append(found.value)

        recipe = make_recipe("dmd2", {**RAY, "run_dir": str(tmp_path / name)})
        runs[name] = fewstep.train(recipe, model=model, on_cycle=on_cycle)

    threads = [threading.Thread(target=train, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: run.complete for name, run in runs.items()} == {"one": True, "two": True}
    assert len(refused) == 1


# What only the workers can see.


def test_damaged_weights_are_a_mistake_of_the_user(
    nothing_left: Any, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    model = ModuleModel(lambda: PointNetwork(2, 8, 1), (2,))
    model.save_network(model.build_network(), weights)
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    changes = {"model": {"family": "module", "weights": str(weights)}}
    with pytest.raises(UserError, match=r"model.safetensors") as found:
        fewstep.train(make_recipe("dmd2", {**TWO_RANKS, **changes}), model=model)
    assert "Traceback" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_groups_and_recipes_that_differ_from_a_checkpoint_are_refused(
    nothing_left: Any, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    changes = {**FAKE_FIRST, "train.cycles": 2, "checkpoint.every": 1}
    fewstep.train(make_recipe("dmd2", {**CHEAP, **changes}))
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("cycle_*"))
    recipe = resolve_recipe(make_recipe("dmd2", {**SPLIT, **changes}))
    seats = [Seat("trainer", group, 0, 0, 5000) for group in GROUPS]
    placement = Placement("accelerator", 1, {k: tuple(v) for k, v in GROUPS.items()}, tuple(seats))
    underway = Underway(60, lambda spans: None)
    with Cluster(recipe.launch, placement, timeout_seconds=60) as cluster:
        groups = {
            seat.group: TrainerGroup(
                cluster, seat.group, GROUPS[seat.group], [seat], recipe, underway
            )
            for seat in seats
        }
        for group, checkpoint in zip(groups.values(), checkpoints, strict=True):
            group.set_up(None, None, checkpoint)
        with pytest.raises(UserError) as found:
            agree(groups, checkpoints[0], recipe)
        lines = [line.split() for line in str(found.value).splitlines()]
        assert lines[2][:3] == ["critic/0", "1", "4"]
        assert lines[3][:3] == ["actor/0", "2", "8"]
        # The same cycle of another run, as where nodes do not share a disk.
        seed = {"seed": 8, "run_dir": str(tmp_path / "other")}
        fewstep.train(make_recipe("dmd2", {**CHEAP, **changes, **seed}))
        (twin,) = (tmp_path / "other" / "checkpoints").glob(checkpoints[1].name)
        groups["critic"].set_up(None, None, twin)
        with pytest.raises(UserError, match="do not stand at the same place of the same run"):
            agree(groups, checkpoints[1], recipe)
        groups["critic"].set_up(None, None, checkpoints[1])
        assert agree(groups, checkpoints[1], recipe).cycle == 2


@pytest.mark.parametrize("cycles", [2, 3])
def test_another_recipe_is_refused_before_anything_is_started(
    make_recipe: Callable[..., Recipe], tmp_path: Path, cycles: int
) -> None:
    changes = {"train.cycles": 2, "checkpoint.every": 1}
    fewstep.train(make_recipe("dmd2", {**CHEAP, **changes}))
    changes |= {**RAY, "train.cycles": cycles, "launch.address": "127.0.0.1:1"}
    for key, value in (("optimizers.student.lr", 0.5), ("model.components", 5)):
        other = make_recipe("dmd2", {**changes, key: value})
        with pytest.raises(UserError, match=rf"{key}: was .*, is {value}"):
            fewstep.train(other, resume=True)


def test_what_cannot_be_sent_to_other_processes_is_named(
    nothing_left: Any, make_recipe: Callable[..., Recipe]
) -> None:
    class Locked(ModuleModel):
        lock = threading.Lock()

    recipe = make_recipe("dmd2", {**RAY, "model": {"family": "module"}})
    with pytest.raises(UserError, match=r"^model: Locked cannot be sent to the processes"):
        fewstep.train(recipe, model=Locked(lambda: PointNetwork(2, 8, 1), (2,)))
