"""Monitoring checks of the loss itself: not a number, not falling from its start, far below that of validation."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

from gptmill.runs.events import EvalDone, StepLogged, TrainEvalDone
from gptmill.training.alarm import Alarm
from gptmill.training.learning_checks import WORSE_EVALUATIONS, Check

MEAN_STEPS = 5  # logged steps whose mean loss is compared
MIN_FALL = 0.02  # of the first loss; healthy runs lose many times as much right after the warm-up
FRESH = 0.8  # of the loss of guessing: below, the model has been trained before
NON_FINITE_STEPS = 3
REMEMBERED_STEPS = 100


class NonFiniteCheck(Check):
    """Whether losses or gradients are not finite again and again. fp16 searches its scale by gradients that are not."""

    about = "nan"

    def __init__(self, remedies: str, *, gradients_count: bool) -> None:
        self._remedies, self._gradients_count = remedies, gradients_count
        self._recent: deque[bool] = deque(maxlen=REMEMBERED_STEPS)
        self._alarm = Alarm()

    def see_step(self, event: StepLogged) -> str:
        is_finite = math.isfinite(event.loss) and (math.isfinite(event.grad_norm) or not self._gradients_count)
        self._recent.append(not is_finite)
        count = sum(self._recent)
        if not self._alarm.check(is_bad=count >= NON_FINITE_STEPS, is_fine=not count, time=event.time):
            return ""
        return (
            f"{count} of the last {len(self._recent)} logged steps were not finite (loss {event.loss:.4g}, gradient "
            f"norm {event.grad_norm:.4g}, learning rate {event.lr:.3g}); if it goes on, {self._remedies}"
        )


class NotLearningCheck(Check):
    """Whether a fresh model still has the loss that it began with, so many steps after the learning-rate warm-up."""

    about = "not_learning"

    def __init__(self, steps: int, warmup_steps: int, vocab_size: int, max_lr: float) -> None:
        self._checked_at, self._max_lr = warmup_steps + steps, max_lr
        self._guess, self._vocab_size = math.log(vocab_size), vocab_size
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=MEAN_STEPS)
        self._is_done = False

    def see_step(self, event: StepLogged) -> str:
        if self._is_done or not math.isfinite(event.loss):
            return ""
        if len(self._first) < MEAN_STEPS:
            self._first.append(event.loss)
            self._is_done = self._first[0] < FRESH * self._guess
        self._recent.append(event.loss)
        if event.step < self._checked_at or len(self._first) < MEAN_STEPS:
            return ""
        self._is_done = True
        first, now = fmean(self._first), fmean(self._recent)
        if now < (1 - MIN_FALL) * first:
            return ""
        return (
            f"the training loss {now:.4f} is hardly below the {first:.4f} it began with (guessing among "
            f"{self._vocab_size:,} tokens is {self._guess:.4f}): the model does not learn; try another --max_lr (it "
            f"is {self._max_lr:g}), and look at what it reads with gptmill data show"
        )


class GapCheck(Check):
    """Whether the validation loss is far above the training loss once text has been read twice.

    With `eval_train` it is compared with the loss on training windows, which is of the same step and without dropout;
    otherwise with the mean of the steps since the evaluation before.
    """

    about = "overfitting"

    def __init__(self, gap: float, *, dropout: float, eval_train: bool) -> None:
        self._gap, self._dropout, self._eval_train = gap, dropout, eval_train
        self._alarm = Alarm()
        self._losses: list[float] = []
        self._val: EvalDone | None = None
        """The newest evaluation, until the loss on training windows is known."""
        self._epoch = 0.0
        self._wide = 0
        """Evaluations in a row with such a gap."""

    def reset(self) -> None:
        self._losses.clear()
        self._val = None
        self._wide = 0

    def see_step(self, event: StepLogged) -> str:
        self._losses.append(event.loss)
        self._epoch = event.epoch
        return ""

    def see_eval(self, event: EvalDone) -> str:
        losses, self._losses = self._losses, []
        if self._eval_train:
            self._val = event
            return ""
        return self._compare(event, fmean(losses), "training loss") if losses else ""

    def see_train_eval(self, event: TrainEvalDone) -> str:
        val, self._val = self._val, None
        if val is None or val.step != event.step:
            return ""
        return self._compare(val, event.train_loss, "loss on training windows")

    def _compare(self, event: EvalDone, train: float, name: str) -> str:
        if not math.isfinite(event.val_loss):
            return ""
        is_wide = self._epoch > 1 and event.val_loss > (1 + self._gap) * train > 0
        self._wide = self._wide + 1 if is_wide else 0
        is_bad = self._wide >= WORSE_EVALUATIONS
        if not self._alarm.check(is_bad=is_bad, is_fine=not self._wide, time=event.time):
            return ""
        above = event.val_loss / train - 1
        return (
            f"after {self._epoch:.1f} epochs the validation loss {event.val_loss:.4f} is {above:.0%} above the "
            f"{name} {train:.4f}: the model learns its text by heart; use more text, fewer epochs, more "
            f"--dropout (it is {self._dropout:g}), a smaller model, or --early_stop_patience"
        )
