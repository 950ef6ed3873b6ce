"""A run that is killed three times ends as the one that was not; `make chaos` does thirty."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos import differences, finish, kill_again_and_again, write_recipe


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    cycles = 80
    whole = write_recipe(tmp_path / "whole.yaml", tmp_path / "whole", cycles)
    killed = write_recipe(tmp_path / "killed.yaml", tmp_path / "killed", cycles)
    finish(whole, "fsdp2", "checkpoint.every=1000")
    kill_again_and_again(killed, tmp_path / "killed", "fsdp2", 2, random.Random(1))
    finish(killed, "fsdp2", "checkpoint.every=1000")
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
