"""The processes of a run: how they are started, what they say, and what they exit with."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fewstep import cli
from fewstep.config import dump_recipe, load_recipe
from fewstep.errors import UserError
from fewstep.launch import command
from fewstep.launch.processes import check_launch, ended_by_failure, launch
from fewstep.run import open_run

COUNTING = Path(__file__).with_name("counting.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_train_and_speak_with_one_voice(start, tmp_path: Path) -> None:
    code, out, err = start().end()
    assert (code, err) == (0, "")
    assert out.count(f"Complete: 4 cycles, in {tmp_path / 'run'}") == 1
    assert out.count("4/4") == 1
    assert out.count("Next: ") == 1
    assert open_run(tmp_path / "run").complete
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "recipe.yaml", "metrics.jsonl", "checkpoints",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_with_other_global_seeds_call_their_networks_as_often(
    make_recipe, tmp_path: Path
) -> None:
    # A rank that took another exit step than the rest would wait for them for ever.
    changes = {"method.steps": 4, "parallel.kind": "fsdp2", "launch.timeout_seconds": 60}
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(make_recipe("dmd2", changes)))
    assert launch([str(COUNTING), str(file), str(tmp_path)], 2, 5).code == 0
    first, second = (int((tmp_path / f"calls_{rank}").read_text()) for rank in (0, 1))
    assert first == second > 4 * 3 * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("train.batch_size=1", "train.batch_size: 1 is given for 2 ranks"),
        ("train.cycles=-1", "train.cycles"),
        ("runtime.device=cuda:0", "runtime.device: 'cuda:0' names one device"),
        (
            "runtime.device=cuda",
            "launch.processes: 2 is given, one for each CUDA device, but there are 1",
        ),
    ],
)
def test_mistakes_are_refused_before_any_process_is_started(
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    changes: str,
    words: str,
) -> None:
    monkeypatch.setattr(command, "launch", lambda *arguments: pytest.fail("was started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cli, "errors", cli.Console(width=300, stderr=True))
    arguments = ["fewstep", "train", str(recipe_file), "launch.processes=2", changes]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_there_already_is_refused_before_any_process_is_started(
    recipe_file: Path, no_sync: None
) -> None:
    import fewstep

    fewstep.train(load_recipe(recipe_file))
    recipe = load_recipe(recipe_file, ["launch.processes=2"])
    with pytest.raises(UserError, match="holds a run already"):
        check_launch(recipe, False)
    check_launch(recipe, True)
    check_launch(recipe, "auto")


@pytest.mark.parametrize(
    ("codes", "code", "killed"),
    [
        ([2, -signal.SIGTERM], 2, []),
        ([1, 1], 1, []),
        ([1, -signal.SIGTERM], 1, []),
        ([143, 143], 143, []),
        ([-signal.SIGTERM, -signal.SIGTERM], 143, []),
        ([143, 1], 1, []),
        ([130, 130], 130, []),
        ([1, -signal.SIGKILL], 1, ["rank 1 was killed by SIGKILL"]),
        ([-signal.SIGSEGV, -signal.SIGTERM], 1, ["rank 0 was killed by SIGSEGV"]),
    ],
)
def test_exit_codes(codes: list[int], code: int, killed: list[str]) -> None:
    failures = {
        rank: ProcessFailure(rank, 100 + rank, exit_code, os.devnull)
        for rank, exit_code in enumerate(codes)
    }
    ended = ended_by_failure(failures)
    assert ended.code == code
    assert list(ended.killed) == killed


def test_a_rank_that_the_launcher_has_killed_in_the_end_is_no_cause() -> None:
    first, hung = (ProcessFailure(r, 100 + r, c, os.devnull) for r, c in enumerate((1, -9)))
    hung.timestamp = first.timestamp + 30
    assert ended_by_failure({0: first, 1: hung}).killed == ()


def test_the_launcher_leaves_this_process_as_it_was(tmp_path: Path) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)], dict(os.environ)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "file = pathlib.Path(sys.argv[1], os.environ['RANK'])\n"
        "file.write_text(os.environ['OMP_NUM_THREADS'] + os.environ['WORLD_SIZE'])\n"
        "sys.exit(3 * (os.environ['RANK'] == '1'))\n"
    )
    assert launch([str(script), str(tmp_path)], 2, 5).code == 1
    assert re.fullmatch(r"\d+2", (tmp_path / "1").read_text())
    after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)], dict(os.environ)
    assert after == before
