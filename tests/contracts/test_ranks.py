"""Several ranks at the same total_batch_size read the same batches and agree with one rank on every loss.

To the bit: test_exact_ranks.py has more of that. Without --exact_ranks, up to rounding.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill, RunRanks, make_environment, wait_for_text

from gptmill.cli.main import run_guarded
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus

# Two windows a micro-batch: two ranks then have two micro-batches each, so that the ranks must wait to exchange.
RANK_FLAGS = [*TINY_FLAGS, "--mini_batch_size", "2", "--checkpoint_freq", "10", "--eval_freq", "10"]


def read_losses(run: Path) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in (run / "log.txt").read_text().splitlines())
    return {name: float(loss) for name, loss in lines}


def test_ranks_of_ddp_that_torchrun_starts_log_the_losses_of_one(
    tmp_path: Path, gptmill: GptMill, words: list[str]
) -> None:
    """Dropout too is the same on any number of ranks."""
    flags = ["train", *words, *RANK_FLAGS, "--max_steps", "50", "--no_exact_ranks", "--dropout", "0.1"]
    gptmill(*flags, "--run_name", "one")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "gptmill"]
    process = subprocess.run(
        [*launcher, *flags, "--run_name", "two"],
        cwd=tmp_path, env=make_environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    one, two = read_losses(tmp_path / "runs/one"), read_losses(tmp_path / "runs/two")
    assert one.keys() == two.keys()
    assert len(one) == 50 + 6
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize(
    "way",
    ["--mixture parts=0.7,words=0.3 --documents masked --order shards", "--data_dir parts --documents whole"],
    ids=["mixture", "whole"],
)
def test_two_ranks_agree_with_one_in_any_way_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_file: Path, run_ranks: RunRanks, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = text_file.read_text(encoding="utf-8").split()
    (tmp_path / "text").mkdir()
    for number in range(60):
        part = " ".join(words[number * 60 : number * 60 + 1 + 7 * number % 50])
        (tmp_path / "text" / f"{number:02d}.txt").write_text(part, encoding="utf-8")
    for source, out in (("text", "parts"), (str(text_file), "words")):
        request = PrepareRequest(out=out, tokenizer="byte", split="tail", val_fraction=0.2, shard_tokens=3000)
        prepare_corpus([source], request, lambda _progress: None)
    arguments = [*RANK_FLAGS, *way.split(), "--sample_tokens", "0", "--max_steps", "12"]
    assert run_guarded(["train", *arguments, "--run_name", "one"]) == 0
    run_ranks("train", *arguments, "--run_name", "two")
    one, two = read_losses(tmp_path / "runs/one"), read_losses(tmp_path / "runs/two")
    assert len(one) == 12 + 3
    assert two == one


def test_experts_learn_the_same_in_any_micro_batches_and_on_any_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], run_ranks: RunRanks
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*RANK_FLAGS, *words, *"--sample_tokens 0 --max_steps 20 --max_lr 1e-2 --feed_forward moe".split()]
    flags += "--num_experts 4 --router_aux_loss 0.1".split()
    for size in ("8", "2"):
        assert run_guarded(["train", *flags, "--mini_batch_size", size, "--run_name", f"by_{size}"]) == 0
    run_ranks("train", *flags, "--run_name", "ranks")
    whole = read_losses(tmp_path / "runs/by_8")
    assert read_losses(tmp_path / "runs/by_2") == pytest.approx(whole, abs=1e-4)
    assert read_losses(tmp_path / "runs/ranks") == read_losses(tmp_path / "runs/by_2")


def test_a_run_of_two_ranks_goes_on_with_one(
    tmp_path: Path, gptmill: GptMill, words: list[str], run_ranks: RunRanks
) -> None:
    run_ranks("train", *words, *RANK_FLAGS, "--max_steps", "10", "--run_name", "two")
    # The first ten steps had a shorter schedule, so the run is compared with itself, resumed on two ranks.
    shutil.copytree(tmp_path / "runs/two", tmp_path / "runs/again", symlinks=True)
    gptmill("train", "--run_name", "two", "--resume", "latest", "--max_steps", "20")
    run_ranks("train", "--run_name", "again", "--resume", "latest", "--max_steps", "20")
    alone, together = read_losses(tmp_path / "runs/two"), read_losses(tmp_path / "runs/again")
    assert len(alone) == 20 + 3
    assert together == alone


def test_a_sharded_run_goes_on_with_one_rank_and_back(
    tmp_path: Path, gptmill: GptMill, words: list[str], run_ranks: RunRanks
) -> None:
    flags = [*words, *RANK_FLAGS, *"--schedule constant --checkpoint_freq 3 --ema_decay 0.9 --parallel fsdp".split()]
    gptmill("train", *flags, "--max_steps", "9", "--run_name", "one")
    run_ranks("train", *flags, "--max_steps", "3", "--run_name", "shared")
    gptmill("train", "--run_name", "shared", "--resume", "latest", "--max_steps", "6")
    run_ranks("train", "--run_name", "shared", "--resume", "latest", "--max_steps", "9")
    one, shared = read_losses(tmp_path / "runs/one"), read_losses(tmp_path / "runs/shared")
    steps = {name: loss for name, loss in one.items() if "train" in name}
    assert len(steps) == 9
    assert {name: shared[name] for name in steps} == pytest.approx(steps, abs=1e-4)


def test_ctrl_c_reaches_all_ranks_and_saves(tmp_path: Path, words: list[str], start_ranks: RunRanks) -> None:
    """A terminal sends it to all of them at once."""
    ranks = start_ranks("train", *words, *RANK_FLAGS, "--max_steps", "100000", "--run_name", "two")
    log = tmp_path / "runs/two/log.txt"
    wait_for_text(ranks[0], log, "\n15 train")
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    output = "".join(rank.communicate(timeout=60)[0] for rank in ranks)
    last_step = int([line for line in log.read_text().splitlines() if "train" in line][-1].split()[0])
    assert (tmp_path / f"runs/two/checkpoints/step_{last_step:06d}").is_dir(), output
    assert "saved; resume with" in output
    assert [rank.returncode for rank in ranks] == [130, 130]
