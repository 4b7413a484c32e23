"""Monitoring checks of what the model learns: gradient norm, plateau of the training loss, overfitting."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import fmean, stdev

from gptmill.runs.events import EvalDone, StepLogged, TrainEvalDone
from gptmill.training.alarm import Alarm, Recent, Usual

NORM_STEPS = 20
FINE_NORM = 0.7  # of the limit: the gradient norm is fine again
BLOCKS = 20  # of a plateau's window, so that it costs the same memory in a long run
MIN_RUN_FRACTION = 0.2  # of the run in a plateau's window: in long runs a healthy loss falls slowly
MIN_LR_FRACTION = 0.3  # of max_lr: below, every loss levels off
MIN_IMPROVEMENT = 0.002  # of the loss, from one half of the window to the other
WORSE_EVALUATIONS = 3


class Check:
    """Sees logged steps and evaluations in order; returns a sentence when something should be said, else nothing."""

    about = ""

    def see_step(self, event: StepLogged) -> str:
        del event
        return ""

    def see_eval(self, event: EvalDone) -> str:
        return self.see_pause(event.time)

    def see_train_eval(self, event: TrainEvalDone) -> str:
        """Comes after the evaluation of the same step, with --eval_train only."""
        return self.see_pause(event.time)

    def see_pause(self, time: float) -> str:
        """Training waited for an evaluation until now."""
        del time
        return ""

    def reset(self) -> None:
        """Forgets the steps so far: later ones cannot be compared with them."""


class GradNormCheck(Check):
    """Whether the gradient norm stays high: above a fixed limit, or far above its usual value."""

    about = "grad_norm"

    def __init__(self, limit: float | None, rise: float | None, warmup_steps: int) -> None:
        self._limit, self._rise, self._warmup_steps = limit, rise, warmup_steps
        self._recent, self._usual = Recent(NORM_STEPS, 0.0), Usual(0.0)
        self._alarm = Alarm()

    def reset(self) -> None:
        self._recent.clear()
        self._usual.clear()

    def see_step(self, event: StepLogged) -> str:
        if event.step <= self._warmup_steps or not math.isfinite(event.grad_norm):
            return ""
        gone = self._recent.add(event.grad_norm, event.seconds)
        if not self._recent.is_full:
            return ""
        now, usual = self._recent.find_median(), self._usual.level
        limits = [self._limit] if self._limit is not None else []
        if self._rise is not None and usual:
            limits.append(self._rise * usual)
        limit = min(limits, default=math.inf)
        if now <= limit:  # else the steps that leave are high ones too, and not what is usual
            self._usual.add(gone)
        if not self._alarm.check(is_bad=now > limit, is_fine=now < FINE_NORM * limit, time=event.time):
            return ""
        before = f", {now / usual:.1f} times its usual {usual:.3g}" if usual else ""
        return (
            f"the gradient norm has been about {now:.3g} for {NORM_STEPS} logged steps, above the limit of "
            f"{limit:.3g}{before}; if the loss does not fall either, lower --max_lr or raise --warmup_steps"
        )


class PlateauCheck(Check):
    """Whether the training loss no longer falls, by the means of two halves of a window.

    It must be clear of noise: what a small, noisy run may still gain is not called a plateau.
    """

    about = "plateau"

    def __init__(self, steps: int, max_steps: int, max_lr: float) -> None:
        self._block_steps = max(steps, math.ceil(MIN_RUN_FRACTION * max_steps)) / BLOCKS
        self._min_lr = MIN_LR_FRACTION * max_lr
        self._alarm = Alarm()
        self.reset()

    def reset(self) -> None:
        self._means: deque[tuple[int, float]] = deque(maxlen=BLOCKS)
        self._block: list[float] = []
        self._block_start: int | None = None

    def see_step(self, event: StepLogged) -> str:
        if event.lr < self._min_lr or not math.isfinite(event.loss):
            self.reset()
            return ""
        if self._block_start is None:
            self._block_start = event.step - 1
        self._block.append(event.loss)
        if event.step - self._block_start < self._block_steps:
            return ""
        self._means.append((self._block_start, fmean(self._block)))
        self._block, self._block_start = [], event.step
        return self._compare_halves(event) if len(self._means) == BLOCKS else ""

    def _compare_halves(self, event: StepLogged) -> str:
        means = [mean for _, mean in self._means]
        first, second = means[: BLOCKS // 2], means[BLOCKS // 2 :]
        before, after = fmean(first), fmean(second)
        changes = [later - earlier for earlier, later in pairwise(means)]
        noise = stdev(changes) / math.sqrt(2) * math.sqrt(2 / len(first))  # of before - after
        gain, least = before - after, MIN_IMPROVEMENT * abs(before)
        if not self._alarm.check(is_bad=gain + noise < least, is_fine=gain > 2 * least, time=event.time):
            return ""
        return (
            f"the training loss has not improved over {event.step - self._means[0][0]:,} steps: {before:.4f} on "
            f"average in their first half, {after:.4f} in the second, at a learning rate of {event.lr:.3g}; "
            f"try another --max_lr or let it decay, a larger model or batch, or stop here"
        )


class OverfittingCheck(Check):
    """Whether the validation loss rises while the training loss falls."""

    about = "overfitting"

    def __init__(self, rise: float) -> None:
        self._rise = rise
        self._alarm = Alarm()
        self._losses: list[float] = []
        self._best: tuple[int, float, float] | None = None
        """Step, validation loss, and the mean training loss of the steps before it."""
        self._worse = 0
        """Evaluations in a row that were worse."""

    def reset(self) -> None:
        self._losses.clear()
        self._best, self._worse = None, 0

    def see_step(self, event: StepLogged) -> str:
        self._losses.append(event.loss)
        return ""

    def see_eval(self, event: EvalDone) -> str:
        if not self._losses or not math.isfinite(event.val_loss):
            return ""
        train = fmean(self._losses)
        self._losses.clear()
        if self._best is None or event.val_loss < self._best[1]:
            self._best, self._worse = (event.step, event.val_loss, train), 0
        best_step, best, train_then = self._best
        is_worse = event.val_loss > best * (1 + self._rise) and train < train_then
        self._worse = self._worse + 1 if is_worse else 0
        is_bad = self._worse >= WORSE_EVALUATIONS
        if not self._alarm.check(is_bad=is_bad, is_fine=not self._worse, time=event.time):
            return ""
        return (
            f"the validation loss {event.val_loss:.4f} is {event.val_loss / best - 1:.1%} above its best "
            f"({best:.4f} at step {best_step:,}), while the training loss fell from {train_then:.4f} to {train:.4f}: "
            f"the model overfits; best_model holds the best weights; use more text, fewer epochs, more --dropout, "
            f"or --early_stop_patience"
        )
