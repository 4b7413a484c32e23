"""Tasks during training change nothing: weights, losses, optimizer and data position are those of a run without."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from conftest import EXACT_FLAGS, TINY_FLAGS, GptMill, RunRanks, Start, wait_for_text
from small_tasks import write_tasks

TASKS = "--eval_tasks hellaswag,lambada --eval_task_data tasks --eval_task_limit 8 --eval_task_freq 20".split()
SCORES = ("hellaswag", "hellaswag/acc", "hellaswag/acc_norm", "lambada", "lambada/perplexity")


def read_end(run: Path) -> dict[str, Any]:
    """What the last checkpoint holds of the state."""
    last = run / "checkpoints/latest"
    values = json.loads((last / "checkpoint.json").read_text())["values"]
    tensors = {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}
    return {**tensors, **{name: value for name, value in values.items() if name not in ("config", "logs")}}


def read_log(run: Path) -> tuple[list[str], list[str]]:
    """The lines of log.txt without the scores, and the names of the scores with their steps."""
    lines = (run / "log.txt").read_text().splitlines()
    names = [line.rpartition(" ")[0] for line in lines]
    own = [name.partition(" ")[2] in SCORES for name in names]
    losses = [line for line, is_score in zip(lines, own, strict=True) if not is_score]
    return losses, [name for name, is_score in zip(names, own, strict=True) if is_score]


def read_scores(run: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "ScoresDone"]


def test_a_run_with_tasks_is_the_run_without_also_when_killed(
    tmp_path: Path, straight: Path, gptmill: GptMill, start: Start
) -> None:
    write_tasks(tmp_path / "tasks")
    gptmill("train", *EXACT_FLAGS, *TASKS, "--run_name", "tasks")
    process = start("train", *EXACT_FLAGS, *TASKS, "--run_name", "killed")
    wait_for_text(process, tmp_path / "runs/killed/log.txt", "\n22 train")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    gptmill("train", "--run_name", "killed", "--resume", "latest", "--eval_task_freq", "20")
    losses, scores = read_log(tmp_path / "runs/tasks")
    assert scores == [f"{step} {name}" for step in (0, 20, 40) for name in SCORES]
    for name in ("tasks", "killed"):
        run = tmp_path / "runs" / name
        assert read_end(run) == read_end(straight), name
        assert (run / "log.txt").read_text() == (tmp_path / "runs/tasks/log.txt").read_text()
        assert [event["step"] for event in read_scores(run)] == [0, 20, 40]
    assert losses == (straight / "log.txt").read_text().splitlines()
    report = gptmill("runs", "compare", "straight", "tasks").stdout
    assert "eval_tasks" in report


def test_two_ranks_score_to_the_bit_as_one(
    tmp_path: Path, gptmill: GptMill, words: list[str], run_ranks: RunRanks
) -> None:
    write_tasks(tmp_path / "tasks")
    flags = [*TINY_FLAGS, *words, *TASKS, "--mini_batch_size", "2", "--eval_freq", "20", "--max_steps", "1"]
    gptmill("train", *flags, "--run_name", "one")
    run_ranks("train", *flags, "--run_name", "two")
    one, two = (read_scores(tmp_path / "runs" / name) for name in ("one", "two"))
    assert [event["step"] for event in one] == [event["step"] for event in two] == [0, 1]
    assert one[0]["scores"] == two[0]["scores"]


def test_tasks_come_and_go_on_resume(tmp_path: Path, straight: Path, gptmill: GptMill) -> None:
    write_tasks(tmp_path / "tasks")
    gptmill("train", "--run_name", "straight", "--resume", "latest", "--max_steps", "41", *TASKS)
    gptmill("train", "--run_name", "straight", "--resume", "latest", "--max_steps", "42", "--eval_tasks", "none")
    assert [event["step"] for event in read_scores(straight)] == [41]
