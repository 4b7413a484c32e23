"""Early stopping: tracks the best validation loss and stops training when it no longer improves."""

from __future__ import annotations

import math
from typing import Any

from gptmill.training.saved_values import read_count, read_dict, read_number


class EarlyStop:
    """Counts evaluations since the loss last fell by more than `min_delta`. A NaN loss is no improvement.

    The best loss is the lowest one, whatever `min_delta`: that decides which model to keep, not when to stop.
    """

    def __init__(self, patience: int | None, min_delta: float) -> None:
        self._patience = patience
        self._min_delta = min_delta
        self._reference_loss = math.inf
        self.best_loss = math.inf
        self.best_step = 0
        self.evaluations_since = 0
        self.is_best = False
        """Whether the newest loss is the best so far."""

    @property
    def is_due(self) -> bool:
        """Whether training should end."""
        return self._patience is not None and self.evaluations_since >= self._patience

    def note(self, step: int, val_loss: float) -> None:
        """Records the loss of an evaluation."""
        self.is_best = val_loss < self.best_loss
        if self.is_best:
            self.best_loss, self.best_step = val_loss, step
        if val_loss < self._reference_loss - self._min_delta:
            self._reference_loss, self.evaluations_since = val_loss, 0
        else:
            self.evaluations_since += 1

    def reason(self) -> str:
        """Why training stops."""
        by = f" by more than {self._min_delta:g}" if self._min_delta else ""
        best = f"; the best was {self.best_loss:.4f} at step {self.best_step}" if self.best_loss < math.inf else ""
        return f"the validation loss has not fallen{by} in {self.evaluations_since} evaluations{best}"

    def state_dict(self) -> dict[str, Any]:
        """JSON values; None where there has been no loss yet."""
        return {
            "best_loss": None if self.best_loss == math.inf else self.best_loss,
            "best_step": self.best_step,
            "mark": None if self._reference_loss == math.inf else self._reference_loss,
            "evaluations_since": self.evaluations_since,
            "is_best": self.is_best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state; an empty one resets."""
        state = read_dict(state, "early_stop")
        best, reference = (read_number(state.get(name), name) for name in ("best_loss", "mark"))
        step, since = (read_count(state.get(name, 0), name) for name in ("best_step", "evaluations_since"))
        self.best_loss = math.inf if best is None else best
        self._reference_loss = math.inf if reference is None else reference
        self.best_step, self.evaluations_since = step, since
        self.is_best = bool(state.get("is_best", False))
