"""What `fewstep inspect` says of checkpoints; of recipes and runs see tests/test_cli.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fewstep.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    open_draft,
    plain_state,
    publish_draft,
    read_manifest,
    tensor_paths,
    write_part,
)
from fewstep.launch.local import train

Inspect = Callable[[Path], tuple[int, str, str]]
RunCommand = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.fixture
def checkpoint(make_recipe) -> Path:
    """The last checkpoint of a run of four cycles, two fake updates each."""
    return latest_checkpoint(train(make_recipe("dmd2", {"storage": "shared_base"})).directory)


@pytest.fixture
def inspect(fewstep: RunCommand) -> Inspect:
    """Run `fewstep inspect`: exit code, standard output, standard error."""
    return lambda target: fewstep("inspect", target)


def row(out: str, start: str) -> list[str]:
    """The cells of the first row of a table that begins so."""
    line = next(
        x for x in out.splitlines() if x.startswith("│") and x[1:].strip().startswith(start)
    )
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_checkpoint_is_checked_and_what_it_holds_is_listed(inspect, checkpoint) -> None:
    code, out, _ = inspect(checkpoint)
    assert code == 0
    assert "Cycle 4: whole, every byte as the manifest says." in out
    assert "storage: shared_base" in out
    files = read_manifest(checkpoint)
    assert files is not None
    shards = [name for name in files if name.startswith("tensors/")]
    size = sum(files[name]["size"] for name in shards)
    assert row(out, f"tensors/ ({len(shards)} shards)")[1] == f"{size:,}"
    assert row(out, "fingerprint.json")[2] == files["fingerprint.json"]["sha256"][:16] + "..."
    assert row(out, "student ")[1:] == ["4", "4", "0"]
    assert row(out, "fake_score ")[1:] == ["8", "8", "0"]
    assert row(out, "student_ema ")[2] == "4"


def test_the_tensors_of_each_network_are_counted(inspect, checkpoint) -> None:
    _, out, _ = inspect(checkpoint)
    state = load_checkpoint(checkpoint)
    for section in ("networks", "optimizers"):
        for name, tensors in state[section].items():
            count = sum(t.numel() for t in tensors.values())
            expected = [str(len(tensors)), f"{count:,}", "float32", f"{count * 4 / 2**20:.2f}", "1"]
            assert row(out, f"{section}/{name}")[1:] == expected


def test_the_tensors_of_all_groups_are_counted(inspect, checkpoint, tmp_path) -> None:
    _, whole, _ = inspect(checkpoint)
    state = load_checkpoint(checkpoint)
    paths = tensor_paths(state)
    # Most of the base and the optimizers with one group, some of the base with another.
    some = [p for p in paths if p.startswith("networks/base/") and ".student." in p]
    assert 0 < len(some) < len(paths)
    shares = {"critic": [p for p in paths if p not in some], "actor": some}
    draft = open_draft(tmp_path / "groups", 4, list(shares))
    files = {}
    for part, share in shares.items():
        files.update(write_part(draft, part, state, share))
    code, out, _ = inspect(publish_draft(draft, plain_state(state), files, {}))
    assert code == 0
    for owner, count in (("networks/base", 2), ("optimizers/student", 1)):
        *cells, shards = row(out, owner)
        assert cells == row(whole, owner)[:-1]
        assert shards == str(count)
    for part, count in (("critic", 3), ("actor", 1)):
        sizes = [e["size"] for name, e in files.items() if name.startswith(f"tensors/{part}/")]
        assert row(out, f"tensors/{part}/ ({count} shards)")[1] == f"{sum(sizes):,}"


@pytest.mark.parametrize("damage", ["flipped", "missing", "no manifest"])
def test_damage_is_named_with_exit_code_2(inspect, checkpoint, damage) -> None:
    file = checkpoint / ("manifest.json" if damage == "no manifest" else "state.json")
    content = file.read_bytes()
    file.unlink()
    if damage == "flipped":
        file.write_bytes(content[:-1] + b" ")
    code, out, err = inspect(checkpoint)
    assert (code, out) == (2, "")
    assert file.name in err


def test_a_checkpoint_that_was_moved_is_known_by_its_manifest(
    inspect, checkpoint, tmp_path
) -> None:
    moved = checkpoint.rename(tmp_path / "kept")
    code, out, _ = inspect(moved)
    assert code == 0
    assert "networks/base" in out


def test_a_path_that_is_not_there_is_named(inspect, tmp_path) -> None:
    code, _, err = inspect(tmp_path / "cycle_000007")
    assert code == 2
    assert "cycle_000007 does not exist" in err


def test_a_run_says_what_its_checkpoints_hold(inspect, checkpoint) -> None:
    code, out, _ = inspect(checkpoint.parents[1])
    assert code == 0
    held = "networks/base, optimizers/student, optimizers/fake_score"
    assert row(out, "cycle_000004")[2] == held


def test_an_average_that_was_never_updated_is_shown_to_be_so(make_recipe, inspect) -> None:
    run = train(make_recipe("dmd2", {"ema": {"start": 1000}}))
    for target in (run.directory, latest_checkpoint(run.directory)):
        _, out, _ = inspect(target)
        assert row(out[out.index("Updates") :], "student_ema")[2] == "0"


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing"])
def test_a_run_whose_state_is_damaged_is_not_shown(inspect, checkpoint, damage) -> None:
    file = checkpoint / "state.json"
    content = file.read_text()
    if damage == "missing":
        file.unlink()
    else:
        changed = content.replace('"successful"', '"succeeded!"' if damage == "flipped" else '"s"')
        file.write_text(changed)
    code, _, err = inspect(checkpoint.parents[1])
    assert code == 2
    assert "state.json" in err
    assert "Remove" in err


def test_a_run_is_shown_whatever_has_become_of_its_weights(inspect, checkpoint) -> None:
    for file in (checkpoint / "tensors").iterdir():
        file.write_bytes(b"?")
    code, out, _ = inspect(checkpoint.parents[1])
    assert code == 0
    # The first such row is the one of memory.
    updates = out[out.index("Updates") :]
    assert row(updates, "fake_score ")[1:4] == ["8", "8", "0"]
