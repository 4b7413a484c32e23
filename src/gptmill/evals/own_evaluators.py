"""Evaluators of the user's own: each gets the model with its tokenizer, and returns one score or several by name."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gptmill.config.errors import UserError
from gptmill.config.plugins import PARTS, split_names
from gptmill.config.run import EvaluationConfig
from gptmill.data.tokenizers import Tokenizer
from gptmill.inference.model import Model
from gptmill.models.language_model import LanguageModel
from gptmill.runs.events import ScoresDone
from gptmill.runtime.world import World


class OwnEvaluator(Protocol):
    """What a registered evaluator is, once it is built with its options."""

    def evaluate(self, model: Model) -> float | Mapping[str, float]: ...


EVALUATORS: dict[str, Callable[[Any], OwnEvaluator]] = {}
"""Registered evaluators. Each is called with its options, once per process."""


class OwnEvaluators:
    """Runs the chosen evaluators on rank 0. One that raises is reported, and the run goes on."""

    def __init__(self, config: EvaluationConfig, tokenizer: Tokenizer, world: World) -> None:
        self._tokenizer = tokenizer
        self._evaluators: dict[str, OwnEvaluator] = {}
        if world.shards_weights:
            raise UserError(
                f"evaluators = {config.evaluators}: they run on rank 0, which holds a part of the weights only with "
                f"--parallel {world.strategy}; leave them out, and score the checkpoints"
            )
        world.run_on_main(lambda: self._build(config))

    def _build(self, config: EvaluationConfig) -> None:
        """Raises UserError, before anything is written, if an evaluator cannot be built."""
        for name in split_names(config.evaluators):
            options: Any = config.evaluator_parts.find(PARTS["evaluator", name].options)
            try:
                self._evaluators[name] = EVALUATORS[name](options)
            except Exception as error:
                raise UserError(f"evaluator {name} cannot start: {type(error).__name__}: {error}; fix that") from error

    def evaluate(self, model: LanguageModel, step: int, is_stopped: Callable[[], bool]) -> ScoresDone | None:
        started, scores = time.monotonic(), dict[str, float]()
        for name, evaluator in self._evaluators.items():
            if is_stopped():
                return None
            try:
                scores |= name_scores(name, evaluator.evaluate(Model(model, self._tokenizer, step)))
            except Exception as error:  # a broken evaluator must not end a run of weeks
                sys.stderr.write(f"warning: evaluator {name} failed at step {step} ({error}); the run continues\n")
        return ScoresDone(step, scores, time.monotonic() - started) if scores else None


def name_scores(name: str, result: float | Mapping[str, float]) -> dict[str, float]:
    """The scores by the evaluator's name, or by EVALUATOR/METRIC where it returned several."""
    if isinstance(result, Mapping):
        return {f"{name}/{metric}": float(score) for metric, score in result.items()}
    return {name: float(result)}
