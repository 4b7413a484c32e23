"""The benchmarks of the founding documents run, in their smallest size, and judge what they find."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT, Start, write_words

FOLDER = PROJECT / "benchmarks" / "founding"
sys.path += [str(FOLDER.parent), str(FOLDER)]
HEADLINE, ABLATION = importlib.import_module("headline_000"), importlib.import_module("ablation_003")
THROUGHPUT = importlib.import_module("throughput_001")
LONGEST_SECONDS = 240.0
MISSED = 1  # a small model on a CPU need not be as fast as a large one on a GPU


def run(start: Start, script: str, *words: str) -> str:
    process = start(*words, "--tiny", program=[str(FOLDER / script)], stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode in (0, MISSED), f"{output}\n{errors}"
    assert "```text\npython " in output
    assert f"{script} {' '.join([*words, '--tiny'])}" in output
    assert "torch " in output
    return output


def test_000_runs_on_a_text_and_stops_early(start: Start, tmp_path: Path) -> None:
    output = run(start, "headline_000.py", str(write_words(tmp_path)), "--tokens", "2000", "--logdir", "runs")
    (steps,) = (line for line in output.splitlines() if line.startswith("| steps |"))
    assert steps == "| steps | 1,610 | 6 | 4 |"
    assert "- a validation loss of 4.74 in less than 30 s: " in output
    assert "- early stopping finds the plateau: stopped at step 4; lowest loss " in output


def test_000_needs_as_many_tokens_as_asked_for(start: Start, tmp_path: Path) -> None:
    words = [str(write_words(tmp_path)), "--tokens", "999999", "--logdir", "runs"]
    process = start(*words, program=[str(FOLDER / "headline_000.py")], stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 2
    assert "of 999,999 tokens; give more text, or fewer --tokens" in errors


def test_001_measures_the_model_and_compares(start: Start) -> None:
    output = run(start, "throughput_001.py")
    assert "| 001, four A100 40GB | 49,300 | 1.00 | 4.00 | 103 | 8.2% |" in output
    assert "| gptmill, fp32 | " in output


def test_001_is_met_by_four_times_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"tflops": 500.0, "mfu": 0.5, "memory_gb": 66.0, "first_step_seconds": 20.0}
    assert THROUGHPUT.report({"bf16": {**row, "tokens_per_second": 4 * 49_300.0}}) == 0
    assert "197,200 tokens/s, 4.00 times, met" in capsys.readouterr().out
    assert THROUGHPUT.report({"bf16": {**row, "tokens_per_second": 190_000.0}}) == MISSED


def test_002_measures_checkpoints_and_trackers(start: Start) -> None:
    output = run(start, "overhead_002.py")
    assert "- a checkpoint every 6 steps at less than 0.5%: " in output
    assert "- tensorboard, with histograms every 250 steps, at less than 1%: " in output
    assert output.count(" ms a step with the trackers") == 2


def test_003_measures_rows_and_goes_on_with_those_that_are_missing(start: Start, tmp_path: Path) -> None:
    words = ["--out", "rows", "--seconds"]
    process = start(*words, "-1", "--tiny", program=[str(FOLDER / "ablation_003.py")])
    assert "rows that are missing: naive, plain, qkv; run the same command again" in process.communicate(timeout=60)[0]
    output = run(start, "ablation_003.py", *words, "200")
    assert "| … fused QKV projection |" in output
    assert (tmp_path / "rows" / "naive.json").is_file()


def write_row(folder: Path, key: str, speed: float, memory_gb: float, mini_batch_size: int = 4) -> None:
    row = {"row": key, "tokens_per_second": speed, "memory_gb": memory_gb, "mfu": None}
    record = {"rows": [row], "mini_batch_size": mini_batch_size}
    (folder / f"{key}.json").write_text(json.dumps(record), encoding="utf-8")


def test_003_confirms_or_corrects_its_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, speed, memory_gb in (("naive", 110.0, 9.0), ("plain", 100.0, 10.0), ("bf16", 220.0, 6.0)):
        write_row(tmp_path, key, speed, memory_gb)
    write_row(tmp_path, "all", 900.0, 4.5)

    def read() -> dict[str, Any]:
        return {key: ABLATION.read_record(tmp_path, key) for key in ("naive", "plain", "bf16", "all")}

    assert ABLATION.report(read()) == MISSED
    output = capsys.readouterr().out
    assert "| mixed precision | 1.5× | 2.00× | −50 % | −33% |" in output
    assert "| all together | 2–5× | 9.00× | −60 to −70 % | −55% |" in output
    assert "- 2 to 5 times as fast: 9.0 times, more than that, met" in output
    assert "- 60 to 70 % less memory: 55% less, missed" in output
    write_row(tmp_path, "all", 300.0, 3.5)
    assert ABLATION.report(read()) == 0


def test_000_is_judged_by_its_events(capsys: pytest.CaptureFixture[str]) -> None:
    def make_run(steps: int, losses: list[float], reason: str, eval_seconds: float = 10.0) -> Any:
        events: list[dict[str, Any]] = [
            {"event": "EvalDone", "step": 100 * number, "val_loss": loss, "time": 100.0 + eval_seconds * number}
            for number, loss in enumerate(losses)
        ]
        events += [{"event": "TrainEvalDone", "step": 0, "train_loss": 11.0}]
        events += [{"event": "TrainEvalDone", "step": steps, "train_loss": 3.3}]
        events += [
            {"event": "StepLogged", "step": step, "loss": 11.0 - step / 200, "seconds": 0.01} for step in (1, steps)
        ]
        events.append({"event": "RunFinished", "step": steps, "reason": reason, "time": 140.0})
        return HEADLINE.Run(events, 100.0)

    stopped, losses = "stopped early: the validation loss has not fallen", [10.9, 5.0, 4.7, 4.75]
    whole, early = make_run(1610, [10.9, 5.0, 4.9, 4.8], "finished"), make_run(1300, losses, stopped)
    assert HEADLINE.report([whole, early]) == 0
    output = capsys.readouterr().out
    assert "| until validation loss 4.74 | 79 min | never | 20.0 s |" in output
    assert "| 4.74 (115), flat from step 1,300 | 4.80 (122) at step 300 | 4.70 (110) at step 200 |" in output
    assert HEADLINE.report([whole, make_run(1300, losses, stopped, eval_seconds=16.0)]) == MISSED
    assert HEADLINE.report([whole, make_run(1300, losses, "finished")]) == MISSED
    assert HEADLINE.report([whole, None]) == MISSED
