"""Several ranks at the same total_batch_size read the same batches and agree with one rank on every loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill, make_environment

from gptmill.cli.main import run_guarded
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus

# Two windows a micro-batch: two ranks then have two micro-batches each, so that the ranks must wait to exchange.
RANK_FLAGS = [*TINY_FLAGS, "--mini_batch_size", "2", "--checkpoint_freq", "10", "--eval_freq", "10"]


def make_torchrun(ranks: int, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, "-m", "gptmill", "train", *arguments]


def run_ranks(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        make_torchrun(ranks, *arguments),
        cwd=folder,
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def read_losses(run: Path) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in (run / "log.txt").read_text().splitlines())
    return {name: float(loss) for name, loss in lines}


@pytest.fixture
def corpus(text_file: Path, gptmill: GptMill) -> list[str]:
    gptmill("prepare", text_file, "--tokenizer", "byte", "--out", "words")
    return ["--data_dir", "words"]


def test_two_ranks_log_the_losses_of_one(tmp_path: Path, gptmill: GptMill, corpus: list[str]) -> None:
    gptmill("train", *corpus, *RANK_FLAGS, "--max_steps", "20", "--run_name", "one")
    run_ranks(tmp_path, 2, *corpus, *RANK_FLAGS, "--max_steps", "20", "--run_name", "two")
    one, two = read_losses(tmp_path / "runs/one"), read_losses(tmp_path / "runs/two")
    assert one.keys() == two.keys()
    assert len(one) == 20 + 3
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize(
    "way",
    ["--mixture parts=0.7,words=0.3 --documents masked --order shards", "--data_dir parts --documents whole"],
    ids=["mixture", "whole"],
)
def test_two_ranks_agree_with_one_in_any_way_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_file: Path, way: str
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
    run_ranks(tmp_path, 2, *arguments, "--run_name", "two")
    one, two = read_losses(tmp_path / "runs/one"), read_losses(tmp_path / "runs/two")
    assert len(one) == 12 + 3
    assert two == pytest.approx(one, abs=1e-4)


def test_a_run_of_two_ranks_goes_on_with_one(tmp_path: Path, gptmill: GptMill, corpus: list[str]) -> None:
    gptmill("train", *corpus, *RANK_FLAGS, "--max_steps", "20", "--run_name", "one")
    run_ranks(tmp_path, 2, *corpus, *RANK_FLAGS, "--max_steps", "10", "--run_name", "two")
    # The first ten steps had a shorter schedule, so the run is compared with itself, gone on with on two ranks.
    (tmp_path / "runs/again").mkdir()
    subprocess.run(["cp", "-r", "runs/two/.", "runs/again"], cwd=tmp_path, check=True)
    gptmill("train", "--run_name", "two", "--resume", "latest", "--max_steps", "20")
    run_ranks(tmp_path, 2, "--run_name", "again", "--resume", "latest", "--max_steps", "20")
    alone, together = read_losses(tmp_path / "runs/two"), read_losses(tmp_path / "runs/again")
    assert len(alone) == 20 + 3
    assert together == pytest.approx(alone, abs=1e-4)


def test_ctrl_c_reaches_all_ranks_and_saves(tmp_path: Path, corpus: list[str]) -> None:
    process = subprocess.Popen(
        make_torchrun(2, *corpus, *RANK_FLAGS, "--max_steps", "100000", "--run_name", "two"),
        cwd=tmp_path,
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log, deadline = tmp_path / "runs/two/log.txt", time.monotonic() + 120
    while not (log.exists() and "\n15 train" in log.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    last_step = int([line for line in log.read_text().splitlines() if "train" in line][-1].split()[0])
    assert (tmp_path / f"runs/two/checkpoints/step_{last_step:06d}").is_dir(), output
    assert "saved; resume with" in output
