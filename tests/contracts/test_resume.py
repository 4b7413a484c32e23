"""A run is never lost: killed or interrupted anywhere and resumed, it ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import EXACT_FLAGS, EXACT_STEPS, GptMill, Start, make_environment, wait_for_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptmill.cli.main import run_guarded
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import open_shards
from gptmill.data.shards.scores import score_by_length, write_scores
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_last_step
from gptmill.runs.events import RunFinished, RunStarted
from gptmill.runs.history import read_history

OTHER_DATA = [word for word in EXACT_FLAGS if word not in ("--data_dir", "words")]

KillAtStep = Callable[..., None]


@pytest.fixture
def kill_at_step(start: Start, tmp_path: Path) -> KillAtStep:
    """Trains the run "killed" and ends it with SIGKILL once its log has reached the step."""

    def kill(step: int, *arguments: str) -> None:
        process = start("train", *arguments, "--run_name", "killed")
        wait_for_text(process, tmp_path / "runs/killed/log.txt", f"\n{step} train")
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"

    return kill


def assert_same_end(one: Path, other: Path, windows_read: int = EXACT_STEPS * 8) -> None:
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
def test_any_way_of_reading_goes_on_bit_identically(tmp_path: Path, kill_at_step: KillAtStep, way: str) -> None:
    flags = [*OTHER_DATA, "--sample_tokens", "0", *way.split()]
    assert run_guarded(["train", *flags, "--run_name", "straight"]) == 0
    kill_at_step(20, *flags)
    assert run_guarded(["train", "--run_name", "killed", "--resume", "latest"]) == 0
    per_step = 2 if "whole" in way else 8
    assert_same_end(tmp_path / "runs/straight", tmp_path / "runs/killed", windows_read=EXACT_STEPS * per_step)


@pytest.mark.usefixtures("_two_corpora")
def test_a_run_does_not_resume_with_other_mixture_weights(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*OTHER_DATA, "--max_steps", "2", "--mixture", "first=0.7,second=0.3"]
    assert run_guarded(["train", *flags, "--run_name", "mixed"]) == 0
    again = ["train", "--run_name", "mixed", "--resume", "latest", "--max_steps", "3"]
    assert run_guarded([*again, "--mixture", "first=0.6,second=0.4"]) == 2
    assert "other mixture weights" in capsys.readouterr().err
    assert run_guarded([*again, "--mixture", "./first=7,./second=3"]) == 0


def test_kill_and_resume_is_bit_identical(
    tmp_path: Path, straight: Path, gptmill: GptMill, kill_at_step: KillAtStep
) -> None:
    """And its logs have every step once."""
    kill_at_step(20, *EXACT_FLAGS, "--use_tensorboard")
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    run = tmp_path / "runs/killed"
    assert_same_end(straight, run)
    every_step, every_eval = list(range(1, EXACT_STEPS + 1)), [0, 10, 20, 30, 40]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "StepLogged"] == every_step
    assert [event["step"] for event in events if event["event"] == "EvalDone"] == every_eval
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("loss/train")] == every_step
    assert [point.step for point in board.Scalars("loss/val")] == every_eval


@pytest.mark.usefixtures("words")
def test_a_run_from_before_the_choice_of_its_softmax_resumes_bit_identically(
    tmp_path: Path, kill_at_step: KillAtStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config does not say that the padding of the vocabulary takes part."""
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["train", *EXACT_FLAGS, "--padded_softmax", "--run_name", "whole"]) == 0
    kill_at_step(20, *EXACT_FLAGS, "--padded_softmax")
    config = tmp_path / "runs/killed/config.toml"
    lines = config.read_text(encoding="utf-8").splitlines()
    config.write_text("\n".join(line for line in lines if "padded_softmax" not in line), encoding="utf-8")
    assert run_guarded(["train", "--run_name", "killed", "--resume", "latest"]) == 0
    assert_same_end(tmp_path / "runs/whole", tmp_path / "runs/killed")


def test_a_fresh_interpreter_goes_on_bit_identically(tmp_path: Path, straight: Path, kill_at_step: KillAtStep) -> None:
    """As the shell starts it: what this proves of forked processes holds for those that users start."""
    kill_at_step(20, *EXACT_FLAGS)
    resume = [sys.executable, "-m", "gptmill", "train", "--run_name", "killed", "--resume", "latest"]
    subprocess.run(resume, cwd=tmp_path, env=make_environment(), capture_output=True, timeout=300, check=True)
    assert_same_end(straight, tmp_path / "runs/killed")


def test_kill_before_the_first_checkpoint_starts_over(
    tmp_path: Path, straight: Path, gptmill: GptMill, kill_at_step: KillAtStep
) -> None:
    kill_at_step(2, *EXACT_FLAGS)
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    assert_same_end(straight, tmp_path / "runs/killed")


def test_a_branch_killed_before_its_first_checkpoint_begins_again_at_its_parent(
    tmp_path: Path, straight: Path, gptmill: GptMill, kill_at_step: KillAtStep
) -> None:
    branch = ["--resume", "runs/straight/checkpoints/step_000016"]
    gptmill("train", *branch, "--run_name", "unbroken")
    kill_at_step(19, *branch)
    assert not list((tmp_path / "runs/killed").glob("checkpoints/step_*"))
    resume = ["train", "--run_name", "killed", "--resume", "latest"]
    straight.rename(tmp_path / "elsewhere")
    refused = gptmill(*resume, check=False)
    assert refused.returncode == 2
    assert "which it started from, is gone" in refused.stderr
    (tmp_path / "elsewhere").rename(straight)
    gptmill(*resume)
    assert_same_end(tmp_path / "runs/unbroken", tmp_path / "runs/killed")


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGUSR2, 140)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_saves_and_exits_cleanly(
    tmp_path: Path, straight: Path, gptmill: GptMill, start: Start, number: int, code: int
) -> None:
    process = start("train", *EXACT_FLAGS, "--run_name", "stopped")
    wait_for_text(process, tmp_path / "runs/stopped/log.txt", "\n11 train")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert "--resume latest" in output
    log = (tmp_path / "runs/stopped/log.txt").read_text().splitlines()
    last_step = int([line for line in log if "train" in line][-1].split()[0])
    assert (tmp_path / "runs/stopped/checkpoints/latest").resolve().name == f"step_{last_step:06d}"
    gptmill("train", "--run_name", "stopped", "--resume", "latest")
    assert_same_end(straight, tmp_path / "runs/stopped")


@pytest.mark.torture
def test_the_demo_killed_at_step_20_ends_with_the_same_weights(
    tmp_path: Path, gptmill: GptMill, kill_at_step: KillAtStep
) -> None:
    smaller = "--total_batch_size 192 --mini_batch_size 2 --eval_tokens 4096 --sample_tokens 4".split()
    flags = ["demo", "--max_steps", str(EXACT_STEPS), *smaller]
    gptmill("train", *flags, "--run_name", "straight")
    kill_at_step(20, *flags)
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    weights = f"checkpoints/step_{EXACT_STEPS:06d}/model.safetensors"
    straight, killed = ((tmp_path / "runs" / name / weights).read_bytes() for name in ("straight", "killed"))
    assert straight == killed


@pytest.mark.usefixtures("words")
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path, start: Start) -> None:
    process = start("train", *EXACT_FLAGS, "--run_name", "piped")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert (tmp_path / f"runs/piped/checkpoints/step_{EXACT_STEPS:06d}").is_dir()
    assert f"\n{EXACT_STEPS} val" in (tmp_path / "runs/piped/log.txt").read_text()


@pytest.mark.usefixtures("words")
def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path, gptmill: GptMill, start: Start) -> None:
    endless = "--max_steps 100000 --checkpoint_freq 100000 --eval_freq 100000 --run_name held".split()
    process = start("train", *EXACT_FLAGS, *endless)
    wait_for_text(process, tmp_path / "runs/held/log.txt", "\n3 train")
    second = gptmill("train", *EXACT_FLAGS, *endless, check=False)
    process.kill()
    assert second.returncode == 2
    assert "another process" in second.stderr


@pytest.mark.usefixtures("words")
def test_a_start_right_after_a_stop_resumes_from_what_the_stop_saved(tmp_path: Path, start: Start) -> None:
    """A start waits for the process before, and chooses its checkpoint when that one has written its last."""
    flags = [*EXACT_FLAGS, *"--max_steps 100000 --checkpoint_freq 3 --eval_freq 100000 --log_freq 1".split()]
    run = RunDirectory(tmp_path / "runs/relay")
    process = start("train", *flags, "--run_name", "relay")
    wait_for_text(process, run.text_log, "\n3 train")
    for _ in range(3):
        following = start("train", "--run_name", "relay", "--resume", "latest")
        assert following.stdout is not None
        assert "waiting up to" in following.stdout.readline()
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        reached = read_last_step(run.events)
        process = following
        wait_for_text(process, run.text_log, f"\n{reached + 4} train")
    process.kill()
    process.wait(timeout=60)
    entries = [entry for entry in read_history(run) if isinstance(entry, RunStarted | RunFinished)]
    assert [type(entry) for entry in entries] == [RunStarted, *[RunFinished, RunStarted] * 3]
    ends, starts = entries[1::2], entries[2::2]
    assert [entry.step for entry in starts] == [entry.step for entry in ends]


def read_all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.usefixtures("words")
def test_a_refused_start_leaves_nothing_behind(tmp_path: Path, gptmill: GptMill) -> None:
    refused = gptmill("train", *EXACT_FLAGS, "--run_name", "new", "--mirror_to", "words.txt/below", check=False)
    assert refused.returncode == 2
    assert not (tmp_path / "runs").exists()
    gptmill("train", *EXACT_FLAGS, "--max_steps", "4", "--run_name", "old")
    before = read_all(tmp_path / "runs")
    refused = gptmill("train", "--run_name", "old", "--resume", "latest", "--max_steps", "3", check=False)
    assert refused.returncode == 2
    assert "beyond max_steps" in refused.stderr
    assert read_all(tmp_path / "runs") == before


@pytest.mark.usefixtures("words")
def test_a_run_does_not_go_on_with_other_tokens(tmp_path: Path, gptmill: GptMill) -> None:
    gptmill("train", *EXACT_FLAGS, "--max_steps", "4", "--run_name", "strict")
    (tmp_path / "other.txt").write_text("another text\n" * 500, encoding="utf-8")
    gptmill("prepare", "other.txt", "--tokenizer", "byte", "--out", "words", "--overwrite")
    refused = gptmill("train", "--run_name", "strict", "--resume", "latest", "--max_steps", "8", check=False)
    assert refused.returncode == 2
    assert "other tokens" in refused.stderr
