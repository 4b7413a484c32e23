"""gptmill train --gpus: refused where there are no GPUs, and else the ranks of torchrun's launcher."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, Start, wait_for_text

from gptmill.config.errors import UserError
from gptmill.experiments import gpu_launcher
from gptmill.experiments.gpu_launcher import choose_num_ranks

# A machine that seems to have two GPUs. Its ranks find none, and train on the CPU.
TWO_GPUS = """
from gptmill.experiments import gpu_launcher
gpu_launcher.count_gpus = lambda: 2
from gptmill.cli.main import main
raise SystemExit(main())
"""
FLAGS = [*TINY_FLAGS[:-2], "--mini_batch_size", "2", "--sample_tokens", "0"]  # without --device cpu


@pytest.mark.parametrize(("gpus", "expected"), [("all", 8), ("1", 1), ("8", 8)])
def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch, gpus: str, expected: int) -> None:
    monkeypatch.setattr(gpu_launcher, "count_gpus", lambda: 8)
    assert choose_num_ranks(gpus, "auto") == expected


@pytest.mark.parametrize(
    ("gpus", "device", "available", "sentence"),
    [
        ("2", "auto", 0, "this machine has none that torch can use; leave it out"),
        ("all", "cpu", 4, "--device cpu uses none"),
        ("9", "auto", 4, "--gpus 9: give all, or a number from 1 to 4"),
        ("0", "auto", 4, "from 1 to 4"),
        ("many", "cuda", 4, "--gpus many: give all"),
    ],
    ids=["no GPU", "CPU", "too many", "none", "no number"],
)
def test_what_this_machine_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: str, device: str, available: int, sentence: str
) -> None:
    monkeypatch.setattr(gpu_launcher, "count_gpus", lambda: available)
    with pytest.raises(UserError, match=sentence):
        choose_num_ranks(gpus, device)


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="torchrun has started the ranks already"):
        choose_num_ranks("2", "auto")


def test_each_gpu_gets_a_rank_and_a_mistake_is_said_once(tmp_path: Path, start: Start, words: list[str]) -> None:
    flags = ["train", *words, *FLAGS, "--max_steps", "2", "--run_name", "two", "--gpus"]
    wrong, _ = (process := start(*flags, "2", "--num_heads", "3", program=("-c", TWO_GPUS))).communicate(timeout=120)
    assert process.returncode == 2, wrong
    assert wrong.count("gptmill") == 1, wrong
    assert "Traceback" not in wrong
    said, _ = (process := start(*flags, "all", program=("-c", TWO_GPUS))).communicate(timeout=120)
    assert process.returncode == 0, said
    assert "2 x CPU" in said
    assert "\n2 train" in (tmp_path / "runs/two/log.txt").read_text()


@pytest.mark.torture  # test_ranks.py has the same without the launcher
def test_ctrl_c_saves_and_ends_with_the_code_of_the_signal(tmp_path: Path, start: Start, words: list[str]) -> None:
    flags = ["--max_steps", "100000", "--run_name", "two", "--gpus", "2"]
    process = start("train", *words, *FLAGS, *flags, program=("-c", TWO_GPUS))
    wait_for_text(process, tmp_path / "runs/two/log.txt", "\n3 train")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "saved; resume with" in said
    assert (tmp_path / "runs/two/checkpoints/latest").exists()
