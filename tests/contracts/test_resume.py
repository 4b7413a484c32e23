"""A run is never lost: killed or interrupted anywhere and resumed, it ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill, make_environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptmill.cli.main import run_guarded
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import open_shards
from gptmill.data.shards.scores import score_by_length, write_scores

STEPS = 40
EXACT_FLAGS = [
    *TINY_FLAGS,
    "--max_steps",
    str(STEPS),
    "--checkpoint_freq",
    "8",
    "--eval_freq",
    "10",
    "--dropout",
    "0.1",
]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gptmill", "train", *arguments],
        cwd=folder,
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Returns once the run's log has reached the step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        log = run / "log.txt"
        if log.exists() and f"\n{step} train" in log.read_text(encoding="utf-8"):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached")


def kill_at_step(folder: Path, step: int, *arguments: str) -> None:
    """Trains the run "killed" and ends it with SIGKILL once it has reached the step."""
    process = start(folder, *arguments, "--run_name", "killed")
    wait_for_step(process, folder / "runs/killed", step)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def assert_same_end(one: Path, other: Path, windows_read: int = STEPS * 8) -> None:
    """Same weights, optimizer, data position and log, byte for byte."""
    last = "checkpoints/latest"
    for name in (f"{last}/model.safetensors", f"{last}/optimizer.safetensors", "log.txt"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    values = [json.loads((run / last / "checkpoint.json").read_text())["values"] for run in (one, other)]
    assert values[0]["windows_read"] == values[1]["windows_read"] == windows_read


@pytest.fixture
def _two_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`first` and `second`: some dozens of documents each, with scores by length."""
    generator = random.Random(1)
    for name, words in (("first", "the quick brown fox jumps over"), ("second", "rain falls on old stones")):
        (tmp_path / f"{name}-text").mkdir()
        for number in range(60):
            text = " ".join(generator.choice(words.split()) for _ in range(generator.randint(1, 60)))
            (tmp_path / f"{name}-text" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
        request = PrepareRequest(
            out=str(tmp_path / name), tokenizer="byte", split="tail", val_fraction=0.2, shard_tokens=3000
        )
        prepare_corpus([str(tmp_path / f"{name}-text")], request, lambda _progress: None)
        shards = open_shards(tmp_path / name)
        write_scores(shards.folder, "length", score_by_length(shards))
    monkeypatch.chdir(tmp_path)


WAYS_OF_READING = {
    "mixture": "--mixture first=0.7,second=0.3",
    "masked mixture by shards": "--mixture first=2,second=1 --documents masked --order shards",
    "whole": "--data_dir first --documents whole",
    "curriculum in stages": "--data_dir first --order curriculum --context_warmup 4:10,8:25 --data_on_device",
}


@pytest.mark.usefixtures("_two_corpora")
@pytest.mark.parametrize("way", WAYS_OF_READING.values(), ids=WAYS_OF_READING.keys())
def test_any_way_of_reading_goes_on_bit_identically(tmp_path: Path, way: str) -> None:
    flags = [*EXACT_FLAGS, "--sample_tokens", "0", *way.split()]
    assert run_guarded(["train", *flags, "--run_name", "straight"]) == 0
    kill_at_step(tmp_path, 20, *flags)
    assert run_guarded(["train", "--run_name", "killed", "--resume", "latest"]) == 0
    per_step = 2 if "whole" in way else 8
    assert_same_end(tmp_path / "runs/straight", tmp_path / "runs/killed", windows_read=STEPS * per_step)


@pytest.mark.usefixtures("_two_corpora")
def test_a_run_does_not_resume_with_other_mixture_weights(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*EXACT_FLAGS, "--max_steps", "2", "--mixture", "first=0.7,second=0.3"]
    assert run_guarded(["train", *flags, "--run_name", "mixed"]) == 0
    again = ["train", "--run_name", "mixed", "--resume", "latest", "--max_steps", "3"]
    assert run_guarded([*again, "--mixture", "first=0.6,second=0.4"]) == 2
    assert "other mixture weights" in capsys.readouterr().err
    assert run_guarded([*again, "--mixture", "./first=7,./second=3"]) == 0


@pytest.fixture
def corpus(text_file: Path, gptmill: GptMill) -> list[str]:
    gptmill("prepare", text_file, "--tokenizer", "byte", "--out", "words")
    return ["--data_dir", "words"]


def test_kill_and_resume_is_bit_identical(tmp_path: Path, gptmill: GptMill, corpus: list[str]) -> None:
    flags = [*corpus, *EXACT_FLAGS, "--use_tensorboard"]
    gptmill("train", *flags, "--run_name", "straight")
    kill_at_step(tmp_path, 20, *flags)
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    assert_same_end(tmp_path / "runs/straight", tmp_path / "runs/killed")


def test_the_logs_of_a_resumed_run_have_every_step_once(tmp_path: Path, gptmill: GptMill, corpus: list[str]) -> None:
    kill_at_step(tmp_path, 20, *corpus, *EXACT_FLAGS, "--use_tensorboard")
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    run = tmp_path / "runs/killed"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "StepLogged"] == list(range(1, STEPS + 1))
    assert [event["step"] for event in events if event["event"] == "EvalDone"] == [0, 10, 20, 30, 40]
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("loss/train")] == list(range(1, STEPS + 1))
    assert [point.step for point in board.Scalars("loss/val")] == [0, 10, 20, 30, 40]


def test_kill_before_the_first_checkpoint_starts_over(tmp_path: Path, gptmill: GptMill, corpus: list[str]) -> None:
    gptmill("train", *corpus, *EXACT_FLAGS, "--run_name", "straight")
    kill_at_step(tmp_path, 2, *corpus, *EXACT_FLAGS)
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    assert_same_end(tmp_path / "runs/straight", tmp_path / "runs/killed")


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGUSR2, 140)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_saves_and_exits_cleanly(
    tmp_path: Path, gptmill: GptMill, corpus: list[str], number: int, code: int
) -> None:
    gptmill("train", *corpus, *EXACT_FLAGS, "--run_name", "straight")
    process = start(tmp_path, *corpus, *EXACT_FLAGS, "--run_name", "stopped")
    wait_for_step(process, tmp_path / "runs/stopped", 11)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert "--resume latest" in output
    log = (tmp_path / "runs/stopped/log.txt").read_text().splitlines()
    last_step = int([line for line in log if "train" in line][-1].split()[0])
    assert (tmp_path / "runs/stopped/checkpoints/latest").resolve().name == f"step_{last_step:06d}"
    gptmill("train", "--run_name", "stopped", "--resume", "latest")
    assert_same_end(tmp_path / "runs/straight", tmp_path / "runs/stopped")


def test_the_demo_killed_at_step_20_ends_with_the_same_weights(tmp_path: Path, gptmill: GptMill) -> None:
    smaller = "--total_batch_size 192 --mini_batch_size 2 --eval_tokens 4096 --sample_tokens 4".split()
    flags = ["demo", "--max_steps", str(STEPS), *smaller]
    gptmill("train", *flags, "--run_name", "straight")
    kill_at_step(tmp_path, 20, *flags)
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    weights = f"checkpoints/step_{STEPS:06d}/model.safetensors"
    straight, killed = ((tmp_path / "runs" / name / weights).read_bytes() for name in ("straight", "killed"))
    assert straight == killed


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path, corpus: list[str]) -> None:
    process = start(tmp_path, *corpus, *EXACT_FLAGS, "--run_name", "piped")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert (tmp_path / f"runs/piped/checkpoints/step_{STEPS:06d}").is_dir()
    assert f"\n{STEPS} val" in (tmp_path / "runs/piped/log.txt").read_text()


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path, gptmill: GptMill, corpus: list[str]) -> None:
    flags = [
        *corpus,
        *EXACT_FLAGS,
        "--max_steps",
        "100000",
        "--checkpoint_freq",
        "100000",
        "--eval_freq",
        "100000",
        "--run_name",
        "held",
    ]
    process = start(tmp_path, *flags)
    wait_for_step(process, tmp_path / "runs/held", 3)
    second = gptmill("train", *flags, check=False)
    process.kill()
    process.communicate()
    assert second.returncode == 2
    assert "another process" in second.stderr


def test_a_run_does_not_go_on_with_other_tokens(tmp_path: Path, gptmill: GptMill, corpus: list[str]) -> None:
    gptmill("train", *corpus, *EXACT_FLAGS, "--max_steps", "4", "--run_name", "strict")
    (tmp_path / "other.txt").write_text("another text\n" * 500, encoding="utf-8")
    gptmill("prepare", "other.txt", "--tokenizer", "byte", "--out", "words", "--overwrite")
    refused = gptmill("train", "--run_name", "strict", "--resume", "latest", "--max_steps", "8", check=False)
    assert refused.returncode == 2
    assert "other tokens" in refused.stderr
