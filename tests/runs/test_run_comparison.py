"""Runs side by side: what differs in their configs, and their losses at the steps that they share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.runs.event_json import to_json
from gptmill.runs.events import EvalDone, Event, StepLogged
from gptmill.runs.run_comparison import MAX_ROWS, compare_runs


def make_run(logdir: Path, name: str, events: list[Event], seed: int = 1) -> RunDirectory:
    config = RunConfig()
    run = create_run(str(logdir), name, replace(config, training=replace(config.training, seed=seed)))
    run.events.write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
    return run


def make_evals(*steps: int, loss: float = 1.0) -> list[Event]:
    return [EvalDone(step, loss, 64, 0.1) for step in steps]


def make_steps(*steps: int, loss: float = 2.0) -> list[Event]:
    return [StepLogged(step, 0.0, loss, 0.1, 1.0, 1.0, 1.0) for step in steps]


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"run{seed}", [], seed) for seed in (1, 2, 1)]
    assert compare_runs(runs).config == {"seed": [1, 2, 1]}
    assert compare_runs(runs[::2]).config == {}


def test_losses_are_compared_at_common_steps(tmp_path: Path) -> None:
    one = make_run(tmp_path, "one", make_evals(0, 5, 10, 20, loss=4.0))
    two = make_run(tmp_path, "two", make_evals(0, 10, 15, 20, 30, loss=3.0))
    comparison = compare_runs([one, two])
    assert comparison.loss_kind == "validation"
    assert comparison.losses == [(0, [4.0, 3.0]), (10, [4.0, 3.0]), (20, [4.0, 3.0])]


def test_training_losses_are_compared_where_no_evaluation_is_common(tmp_path: Path) -> None:
    one = make_run(tmp_path, "one", [*make_steps(1, 2, 3), *make_evals(2)])
    two = make_run(tmp_path, "two", [*make_steps(2, 3, 4, loss=1.0), *make_evals(3)])
    comparison = compare_runs([one, two])
    assert comparison.loss_kind == "training"
    assert comparison.losses == [(2, [2.0, 1.0]), (3, [2.0, 1.0])]


def test_long_runs_are_compared_at_some_steps_from_the_first_to_the_last(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, make_evals(*range(0, 1000, 10))) for name in ("one", "two")]
    steps = [step for step, _losses in compare_runs(runs).losses]
    assert len(set(steps)) == MAX_ROWS
    assert (steps[0], steps[-1]) == (0, 990)


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, make_evals(0, loss=float("nan"))) for name in ("one", "two")]
    assert compare_runs(runs).losses == []


def test_a_damaged_config_is_a_user_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", [])
    run.config.write_text("[", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.toml"):
        compare_runs([run, run])
