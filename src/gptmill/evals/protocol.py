"""What an evaluator is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gptmill.models.gpt import GPT
from gptmill.runs.events import Event


class Evaluator(Protocol):
    """Scores a model. Called on every rank, with the model in evaluation mode and without gradients.

    An evaluator that only the main rank runs returns None on the others. One that takes long asks `is_stopped` now
    and then, and comes to an end once it is true; what it then returns is not used.
    """

    def evaluate(self, model: GPT, step: int, is_stopped: Callable[[], bool]) -> Event | None: ...
