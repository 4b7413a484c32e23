"""What an evaluator is."""

from __future__ import annotations

from typing import Protocol

from gptmill.models.gpt import GPT
from gptmill.runs.events import Event


class Evaluator(Protocol):
    """Scores a model. Called on every rank, with the model in evaluation mode and without gradients.

    An evaluator that only the main rank runs returns None on the others.
    """

    def evaluate(self, model: GPT, step: int) -> Event | None: ...
