"""A rank killed in the middle of a save of all ranks leaves nothing half: the older checkpoint stays the newest."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import dying_rank
import pytest
from conftest import TINY_FLAGS, RunRanks, TortureBudget
from zygote import Process

from gptmill.cli.main import run_guarded
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders, read_step
from gptmill.runs.checkpoints.tiers import LATEST, read_tiers

FLAGS = [*TINY_FLAGS, "--sample_tokens", "0"]


def test_a_rank_killed_in_mid_save_leaves_nothing_half(
    tmp_path: Path, words: list[str], start_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--parallel fsdp --no_exact_ranks --checkpoint_freq 2 --max_steps 100000 --run_name two".split()
    first, second = start_ranks("train", *words, *FLAGS, *flags, program=[dying_rank.__file__])
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


@pytest.mark.torture
def test_ranks_killed_at_any_moment_of_a_save_leave_valid_checkpoints(
    tmp_path: Path,
    words: list[str],
    start_ranks: RunRanks,
    monkeypatch: pytest.MonkeyPatch,
    torture_budget: TortureBudget,
) -> None:
    """Other numbers of ranks and other strategies go on from what each kill has left."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/killed/checkpoints"
    flags = ["train", *words, *FLAGS, "--checkpoint_freq", "1", "--max_steps", "100000", "--run_name", "killed"]
    newest = 0
    for seed in torture_budget(3):
        dice = random.Random(seed)
        count, strategy = dice.choice([(1, "ddp"), (2, "zero1"), (2, "fsdp"), (4, "fsdp"), (4, "ddp")])
        more = ["--no_exact_ranks", "--parallel", strategy, "--mini_batch_size", "2", "--resume", "auto"]
        ranks = start_ranks(*flags, *more, count=count)
        wait_for_saves(folder, newest + dice.randrange(1, 5), ranks)
        time.sleep(dice.random() * 0.02)
        for rank in dice.sample(ranks, count):
            rank.kill()
        for rank in ranks:
            rank.communicate(timeout=60)
        saved = list_step_folders(folder)
        assert not any(find_damage(path, thorough=True) for path in saved)
        assert read_step(saved[-1]) > newest
        newest = read_step(saved[-1])


def wait_for_saves(folder: Path, step: int, ranks: list[Process]) -> None:
    """Returns once a step is saved, in the middle of the next save."""
    deadline = time.monotonic() + 120
    while not (list_step_folders(folder) and read_step(list_step_folders(folder)[-1]) >= step):
        assert all(rank.poll() is None for rank in ranks), "".join(rank.communicate(timeout=60)[0] for rank in ranks)
        assert time.monotonic() < deadline, f"step {step} was never saved"
        time.sleep(0.002)
