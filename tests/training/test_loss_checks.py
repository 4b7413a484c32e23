"""Checks of the loss: not finite, not falling, far below that of validation; healthy runs hear nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from conftest import EXACT_FLAGS
from steps import make_noise, make_step, show
from tiny import make_config, make_shards, plan_for

from gptmill.cli.main import run_guarded
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, Event, StepLogged, TrainEvalDone, Warned
from gptmill.training.loss_checks import GapCheck, NonFiniteCheck, NotLearningCheck
from gptmill.training.monitor import build_monitor


def make_losses(first: float, last: float, steps: int = 300, noise: float = 0.02) -> list[StepLogged]:
    """An exponential fall from one loss to another."""
    generator = make_noise()
    return [
        make_step(step, loss=last + (first - last) * math.exp(-step / 60) + generator.gauss(0, noise))
        for step in range(1, steps + 1)
    ]


def test_a_fresh_model_that_does_not_learn_is_told_once() -> None:
    (warning,) = show(NotLearningCheck(100, 50, 50_257, 1e-7), make_losses(10.82, 10.75))
    assert (warning.about, warning.step) == ("not_learning", 150)
    assert "guessing among 50,257 tokens is 10.8249" in warning.message
    assert "another --max_lr (it is 1e-07)" in warning.message


@pytest.mark.parametrize(
    ("first", "last", "steps"),
    [(10.82, 7.0, 300), (10.82, 10.4, 300), (3.1, 3.1, 300), (10.82, 10.82, 140)],
    ids=["learns", "learns slowly", "was trained before", "too short"],
)
def test_other_losses_are_those_of_a_model_that_learns(first: float, last: float, steps: int) -> None:
    assert show(NotLearningCheck(100, 50, 50_257, 1e-3), make_losses(first, last, steps)) == []


def make_evals(pairs: list[tuple[float, float]], epochs: float) -> list[Event]:
    """For each pair, ten steps with this training loss, and an evaluation with this validation loss."""
    events: list[Event] = []
    for number, (train, val) in enumerate([pairs[0], *pairs]):  # the first steps are not seen
        epoch = epochs * (number + 1) / (len(pairs) + 1)
        events += [make_step(10 * number + step, loss=train, epoch=epoch) for step in range(1, 11)]
        events.append(EvalDone(10 * number + 10, val, 64, 0.1, time=1e6 + 20 * number + 20.5))
    return events


def test_a_validation_loss_far_above_that_of_training_is_told_once() -> None:
    """As of a large model over five epochs of a small corpus: validation stalls, training falls on."""
    pairs = [(5.8, 5.9), (5.2, 5.3), (4.6, 4.95), (3.8, 4.8), (3.6, 4.75), (3.4, 4.74), (3.35, 4.74)]
    (warning,) = show(GapCheck(0.3, dropout=0.1, eval_train=False), make_evals(pairs, 5.0))
    assert warning.about == "overfitting"
    assert "the validation loss 4.7400 is 41% above the training loss 3.3500" in warning.message
    assert "--dropout (it is 0.1)" in warning.message


@pytest.mark.parametrize(
    ("pairs", "epochs"),
    [
        ([(3.0 - 0.1 * n, 3.2 - 0.1 * n) for n in range(10)], 5.0),
        ([(2.0, 3.0)] * 10, 0.9),
        ([(2.0, 3.0), (2.0, 2.1)] * 5, 5.0),
    ],
    ids=["both fall", "other text in the first epoch", "noise"],
)
def test_a_small_or_passing_gap_is_not_overfitting(pairs: list[tuple[float, float]], epochs: float) -> None:
    assert show(GapCheck(0.3, dropout=0.0, eval_train=False), make_evals(pairs, epochs)) == []


def add_train_evals(events: list[Event], loss: float) -> list[Event]:
    """Each evaluation is followed by one on training windows, with this loss."""
    return [
        each
        for event in events
        for each in ([event, TrainEvalDone(event.step, loss, 64, 0.1)] if isinstance(event, EvalDone) else [event])
    ]


def test_with_eval_train_the_losses_of_the_same_step_are_compared(text_file: Path) -> None:
    """Dropout raises the loss of the steps, and hides a gap; easy batches show one that is not there."""
    hidden = add_train_evals(make_evals([(4.5, 4.74)] * 6, 5.0), loss=3.35)
    seeming = add_train_evals(make_evals([(3.35, 4.74)] * 6, 5.0), loss=4.5)
    shards = make_shards(text_file)

    def warn(events: list[Event], *, eval_train: bool) -> list[str]:
        config = make_config(eval_train=eval_train)
        monitor = build_monitor(config, plan_for(config, shards), None)
        return [warning.message for event in events for warning in monitor.check(event)]

    (message,) = warn(hidden, eval_train=True)
    assert "the validation loss 4.7400 is 41% above the loss on training windows 3.3500" in message
    assert (warn(hidden, eval_train=False), warn(seeming, eval_train=True)) == ([], [])
    assert len(warn(seeming, eval_train=False)) == 1


def test_steps_that_are_not_finite_are_told_once_with_remedies() -> None:
    steps = [make_step(step, loss=math.nan if step > 50 else 3.0) for step in range(1, 100)]
    (warning,) = show(NonFiniteCheck("lower --max_lr", gradients_count=True), steps)
    assert (warning.about, warning.step) == ("nan", 53)
    assert "3 of the last 50 logged steps were not finite (loss nan, gradient norm 0.5" in warning.message
    assert warning.message.endswith("lower --max_lr")


def test_fp16_may_search_its_loss_scale() -> None:
    steps = [make_step(step, grad_norm=math.inf if step % 3 else 0.5) for step in range(1, 100)]
    assert show(NonFiniteCheck("", gradients_count=False), steps) == []
    assert len(show(NonFiniteCheck("", gradients_count=True), steps)) == 1


def test_a_model_that_cannot_learn_says_so_in_every_record(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*EXACT_FLAGS, "--run_name", "stuck", "--max_lr", "1e-9", "--min_lr", "1e-10", "--warn_not_learning", "10"]
    assert run_guarded(["train", *flags, "--warmup_steps", "0", "--max_steps", "16"]) == 0
    printed = capsys.readouterr().out
    for path in (tmp_path / "runs/stuck/events.jsonl", tmp_path / "runs/stuck/ledger.jsonl"):
        (warning,) = [event for event in read_events(path) if isinstance(event, Warned) and event.about != "schedule"]
        assert warning.about == "not_learning"
        assert f"warning: {warning.message}" in printed
    assert not any(isinstance(event, Warned) for event in read_events(straight / "ledger.jsonl"))
