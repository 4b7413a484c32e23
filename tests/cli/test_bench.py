"""gptmill bench as a process: real trainings of a few steps, measured, and nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from conftest import TINY_FLAGS, GptMill, Start

from gptmill.config import exit_codes

TINY = [*TINY_FLAGS, "--tokenizer", "byte", "--steps", "3"]


def test_a_recipe_is_measured_without_any_data(tmp_path: Path, gptmill: GptMill) -> None:
    process = gptmill("bench", *TINY, "--json", "out.json")
    (row,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    assert row["tokens_per_second"] > 0
    assert row["tokens_per_step"] == 128
    assert row["first_step_seconds"] > 0
    assert row["memory_gb"] > 0
    assert process.stdout.startswith("demo on CPU, 1 thread, random tokens\n")
    assert "(median of 3 steps of 128 tokens, after 3 warm-up steps)" in process.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_ctrl_c_prints_the_rows_so_far_and_leaves_nothing(tmp_path: Path, start: Start) -> None:
    rows = ["--ablate", "--rows", "naive,accumulate", "--json", "out.json"]
    process = start("bench", *TINY, *rows, stderr=subprocess.PIPE)
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line.startswith("row 2 of 2"):
            process.send_signal(signal.SIGINT)
            break
    rest, complaints = process.communicate(timeout=60)
    assert process.returncode == exit_codes.INTERRUPTED, [before, rest, complaints]
    assert complaints == "gptmill: interrupted\n"
    assert any(line.startswith("naive  ") for line in rest.splitlines())
    assert "accumulation" not in rest
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["row"] for row in record["rows"]] == ["naive"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
