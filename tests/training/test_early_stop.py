"""Training ends when the validation loss has stopped falling; the best loss is the lowest one."""

from __future__ import annotations

import json
import math

import pytest

from gptmill.training.early_stop import EarlyStop


def note_all(early_stop: EarlyStop, losses: list[float]) -> list[bool]:
    """Whether it was due after each evaluation."""
    due = []
    for number, loss in enumerate(losses, 1):
        early_stop.note(100 * number, loss)
        due.append(early_stop.is_due)
    return due


@pytest.mark.parametrize(
    ("patience", "min_delta", "losses", "due_at"),
    [
        (2, 0.0, [3.0, 2.0, 2.1, 2.0], 4),  # the same again is no improvement
        (2, 0.0, [3.0, 2.0, 2.1, 1.9, 2.0, 2.0], 6),
        (1, 0.0, [3.0, 3.1], 2),
        (2, 0.1, [3.0, 2.95, 2.91], 3),
        (2, 0.1, [3.0, 2.95, 2.89, 2.8], None),  # small steps add up
        (2, 0.0, [3.0, math.nan, math.nan], 3),
        (2, 0.0, [math.nan, math.inf], 2),
        (3, 0.0, [3.0, math.nan, 2.9, math.nan, math.nan], None),
        (None, 0.0, [1.0] * 50, None),
    ],
)
def test_it_is_due_after_so_many_evaluations_without_improvement(
    patience: int | None, min_delta: float, losses: list[float], due_at: int | None
) -> None:
    due = note_all(EarlyStop(patience, min_delta), losses)
    assert (due.index(True) + 1 if True in due else None) == due_at


def test_the_best_is_the_lowest_however_small_the_difference() -> None:
    early_stop, best = EarlyStop(2, min_delta=0.5), []
    for step, loss in enumerate([3.0, 2.9, 2.9, math.nan, 2.8], 1):
        early_stop.note(step, loss)
        best.append(early_stop.is_best)
    assert best == [True, True, False, False, True]
    assert (early_stop.best_loss, early_stop.best_step, early_stop.evaluations_since) == (2.8, 5, 4)
    assert early_stop.is_due


def test_the_reason_names_the_best() -> None:
    early_stop = EarlyStop(2, 0.01)
    note_all(early_stop, [3.0, 2.5, 2.6, 2.7])
    assert early_stop.reason() == (
        "the validation loss has not fallen by more than 0.01 in 2 evaluations; the best was 2.5000 at step 200"
    )
    hopeless = EarlyStop(2, 0.0)
    note_all(hopeless, [math.nan, math.nan])
    assert hopeless.reason() == "the validation loss has not fallen in 2 evaluations"


@pytest.mark.parametrize("cut", range(6))
def test_a_resumed_one_decides_the_same(cut: int) -> None:
    losses = [math.nan, 3.0, 2.5, 2.49, math.inf, 2.48]
    straight, before, after = (EarlyStop(3, 0.02) for _ in range(3))
    note_all(before, losses[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    assert note_all(straight, losses)[cut:] == note_all(after, losses[cut:])
    assert after.best_loss == straight.best_loss
    assert after.evaluations_since == straight.evaluations_since


def test_a_checkpoint_from_before_has_nothing_to_say() -> None:
    early_stop = EarlyStop(1, 0.0)
    note_all(early_stop, [1.0, 2.0])
    early_stop.load_state_dict({})
    assert (early_stop.best_loss, early_stop.is_due) == (math.inf, False)
