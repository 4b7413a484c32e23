"""Ranks that share layers, windows or experts train as one rank does, and each resumes what another has saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TINY_FLAGS, RunRanks

from gptmill.cli.main import run_guarded
from gptmill.runs.checkpoints.storage import Checkpoint, load_checkpoint

STEPS = ("--max_steps", "6", "--checkpoint_freq", "2", "--eval_freq", "3", "--mini_batch_size", "4", "--max_lr", "1e-2")
FLAGS = [*TINY_FLAGS, *STEPS, "--data_dir", "words", "--no_exact_ranks", "--num_heads", "4"]
LLAMA = "--num_kv_heads 2 --feed_forward swiglu --positions rope --norm rmsnorm --qk_norm --value_embeddings 1".split()
MOE = "--feed_forward moe --num_experts 4 --router_aux_loss 0.1".split()
WAYS = {
    "tensor": (["--tensor_parallel", "2"], [*LLAMA, "--ema_decay", "0.9"], 2),
    "context": (["--context_parallel", "2"], [*LLAMA, "--documents", "masked", "--attention_windows", "5,full"], 2),
    "expert": (["--expert_parallel", "2"], [*MOE, "--optimizer", "muon"], 2),
}
COMBINATIONS = {
    "copies of tensor": (["--tensor_parallel", "2"], [*LLAMA, "--optimizer", "muon"], 4),
    "copies of context": (["--context_parallel", "2"], LLAMA, 4),
    "copies of expert": (["--expert_parallel", "2"], MOE, 4),
    "context and tensor": (["--context_parallel", "2", "--tensor_parallel", "2"], LLAMA, 4),
    "four experts": (["--expert_parallel", "4"], MOE, 4),
}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert words == ["--data_dir", "words"]


def read_log(run: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in Path("runs", run, "log.txt").read_text(encoding="utf-8").splitlines())
    return {name: float(loss) for name, loss in lines}


def read_state(run: str, step: int) -> Checkpoint[torch.Tensor]:
    groups = ("model", "optimizer", "ema")
    return load_checkpoint(Path("runs", run, "checkpoints", f"step_{step:06d}"), groups)


def train_alone(*flags: str) -> None:
    assert run_guarded(["train", *flags]) == 0


def check_same(one: str, other: str) -> None:
    """Two runs logged the same losses, and ended with the same state."""
    expected = read_log(one)
    assert len(expected) == 6 + 3
    assert read_log(other) == pytest.approx(expected, abs=1e-5)
    ours, theirs = read_state(one, 6).tensors, read_state(other, 6).tensors
    assert ours.keys() == theirs.keys()
    for group, tensors in ours.items():
        assert tensors.keys() == theirs[group].keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(theirs[group][name], tensor, rtol=1e-4, atol=1e-5, msg=f"{group}: {name}")


def check_all_moved(run: str) -> None:
    before, after = (read_state(run, step).tensors["model"] for step in (2, 6))
    assert not [name for name, tensor in after.items() if torch.equal(tensor, before[name])]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one_and_resume_each_other(way: str, run_ranks: RunRanks) -> None:
    parallel, model, count = WAYS[way]
    train_alone(*FLAGS, *model, "--run_name", "one")
    run_ranks("train", *FLAGS, *model, *parallel, "--run_name", "ranks", count=count)
    check_same("one", "ranks")
    check_all_moved("ranks")
    if way == "context":
        return  # all ranks hold the whole state, and rank 0 saves it as one rank would
    none = [word if word.startswith("--") else "1" for word in parallel]
    train_alone("--resume", "runs/ranks/checkpoints/step_000002", "--run_name", "alone", *none)
    check_last_steps("alone", "one")
    if way == "expert":
        return  # experts are read by the same spans as heads
    run_ranks("train", "--resume", "runs/alone/checkpoints/step_000004", "--run_name", "back", *parallel, count=count)
    check_last_steps("back", "one")


def check_last_steps(run: str, whole: str) -> None:
    """A run that began at a later step agrees with one that has all."""
    expected, found = read_log(whole), read_log(run)
    assert "6 val" in found
    assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("way", COMBINATIONS)
def test_four_ranks_train_as_one(way: str, run_ranks: RunRanks) -> None:
    parallel, model, count = COMBINATIONS[way]
    flags = [*FLAGS, *model, "--mini_batch_size", "2"]
    train_alone(*flags, "--run_name", "one")
    run_ranks("train", *flags, *parallel, "--run_name", "ranks", count=count)
    check_same("one", "ranks")
    check_all_moved("ranks")


@pytest.mark.parametrize("flag", ["tensor_parallel", "context_parallel"])
def test_one_process_is_told_how_to_start_more(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["train", *FLAGS, f"--{flag}", "2", "--run_name", "one"]) == 2
    message = capsys.readouterr().err
    assert f"{flag} 2 takes 2 ranks or a multiple of them, not 1; start them with torchrun" in message
    assert not Path("runs").exists()
