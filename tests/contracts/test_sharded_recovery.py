"""A rank killed in the middle of a save of all ranks leaves nothing half: the older checkpoint stays the newest."""

from __future__ import annotations

import signal
from pathlib import Path

import dying_rank
import pytest
from conftest import TINY_FLAGS, RunRanks

from gptmill.cli.main import run_guarded
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders
from gptmill.runs.checkpoints.tiers import LATEST, read_tiers

FLAGS = [*TINY_FLAGS, *"--parallel fsdp --no_exact_ranks --checkpoint_freq 2 --sample_tokens 0".split()]


def test_a_rank_killed_in_mid_save_leaves_nothing_half(
    tmp_path: Path, words: list[str], start_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = start_ranks(
        "train", *words, *FLAGS, "--max_steps", "100000", "--run_name", "two", program=[dying_rank.__file__]
    )
    assert second.wait(timeout=120) == -signal.SIGKILL
    first.kill()  # as torchrun does it
    first.communicate(timeout=60)
    second.communicate(timeout=60)
    folder = tmp_path / "runs/two/checkpoints"
    (older,) = list_step_folders(folder)
    assert older.name == "step_000002"
    assert find_damage(older, thorough=True) == ""
    assert read_tiers(folder)[LATEST] == older
    (partial,) = folder.glob(".step_000004.*.partial")
    assert (partial / "model.00001.safetensors").is_file()
    resumed = ["train", "--run_name", "two", "--resume", "latest", "--max_steps", "3", "--parallel", "ddp"]
    assert run_guarded(resumed) == 0
    assert [path.name for path in list_step_folders(folder)] == ["step_000002", "step_000003"]
    assert not list(folder.glob(".*"))
