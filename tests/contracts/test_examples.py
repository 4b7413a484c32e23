"""The examples run as they are, and go on after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import PROJECT, Start, wait_for_text

import gptmill


@pytest.mark.slow
def test_the_first_model_learns_also_after_a_kill(tmp_path: Path, start: Start) -> None:
    program = (str(PROJECT / "examples/first_model.py"),)
    first = start(program=program)
    wait_for_text(first, tmp_path / "runs/animals/log.txt", "\n25 train")
    first.kill()
    first.communicate()
    second = start(program=program)
    output = second.communicate()[0]
    assert second.returncode == 0, output
    run = gptmill.open_run("animals", tmp_path / "runs")
    assert run.metrics["step"].tolist() == list(range(1, 121))
    assert run.evaluations["val_loss"][-1] < 0.6
    assert "a sentence of the grammar" in output
    assert "steps      0 to" not in output
