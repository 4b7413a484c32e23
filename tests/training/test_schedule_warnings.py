"""Warnings about the learning rate reach the console and the run history, with numbers, and only where they are due."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill

from gptmill.config.optimizer import Constant, Cosine, Linear, OptimizerConfig, Wsd
from gptmill.training.schedule_warnings import find_schedule_warnings


def test_a_run_that_ends_within_its_warm_up_is_warned_of() -> None:
    config = OptimizerConfig(max_lr=1e-3, warmup_steps=715)
    (warning,) = find_schedule_warnings(config, 100)
    assert "max_steps 100 ends within warmup_steps 715" in warning
    assert "to 0.00014 of max_lr 0.001" in warning
    assert find_schedule_warnings(config, 715) == []
    assert find_schedule_warnings(config, 100, 50, 100) == []  # said when the run began


@pytest.mark.parametrize(
    ("schedule", "step", "numbers"),
    [
        (Cosine(1e-4), 100, "is 0.00055 instead of 0.0001"),
        (Linear(1e-4), 50, "is 0.000774 instead of 0.000545"),
        (Wsd(1e-4), 90, "is 0.001 instead of 0.000505"),
    ],
    ids=repr,
)
def test_other_max_steps_that_reshape_the_schedule_are_warned_of(
    schedule: Cosine | Linear | Wsd, step: int, numbers: str
) -> None:
    config = OptimizerConfig(max_lr=1e-3, schedule=schedule, warmup_steps=0)
    (warning,) = find_schedule_warnings(config, 200, step, 100)
    assert f"reshapes the {schedule.tag} schedule: the learning rate after step {step} {numbers}" in warning


def test_other_max_steps_that_leave_the_schedule_as_it_is_are_no_surprise() -> None:
    for schedule in (Wsd(1e-4), Constant()):
        assert find_schedule_warnings(OptimizerConfig(schedule=schedule, warmup_steps=5), 200, 50, 100) == []
    assert find_schedule_warnings(OptimizerConfig(warmup_steps=50), 200, 40, 100) == []


def test_a_longer_run_is_told_what_that_does_to_its_learning_rate(gptmill: GptMill, straight: Path) -> None:
    output = gptmill("train", "--run_name", straight.name, "--resume", "latest", "--max_steps", "44").stdout
    warning = r"warning: max_steps 44 instead of 40 reshapes the cosine schedule: .* step 40 is \S+ instead of 0\.0001"
    assert len(re.findall(warning, output)) == 1
    assert re.search(warning, gptmill("checkpoints", "history", straight.name).stdout)
    again = gptmill("train", "--run_name", straight.name, "--resume", "40", "--max_steps", "44").stdout
    assert re.search(warning, again)  # the checkpoint of step 40 knows of 40 steps only
    assert "warning" not in gptmill("train", "--run_name", straight.name, "--resume", "latest").stdout


def test_a_run_that_ends_within_its_warm_up_is_told_so(gptmill: GptMill, words: list[str]) -> None:
    flags = [*TINY_FLAGS, *words, "--max_steps", "1", "--warmup_steps", "50", "--run_name", "short"]
    assert "warning: max_steps 1 ends within warmup_steps 50" in gptmill("train", *flags).stdout
    assert "warning: max_steps 1 ends within warmup_steps 50" in gptmill("checkpoints", "history", "short").stdout
