"""A model in, events out. `Evaluator` is what training calls; a new one is added to `build_evaluators`."""

from __future__ import annotations

from gptmill.config.run import RunConfig
from gptmill.data.run_corpora import Corpora
from gptmill.evals.loss import ValidationLoss
from gptmill.evals.protocol import Evaluator
from gptmill.evals.samples import Samples
from gptmill.runtime.world import World


def build_evaluators(config: RunConfig, corpora: Corpora, world: World) -> list[Evaluator]:
    """The evaluators of a run, in the order in which they are asked."""
    evaluators: list[Evaluator] = [ValidationLoss(config, corpora, world)]
    if config.evaluation.sample_tokens:
        compiled, seed = config.machine.compile, config.training.seed
        evaluators.append(Samples(config.evaluation, corpora.tokenizer, seed, world, compiled=compiled))
    return evaluators


__all__ = ["Evaluator", "build_evaluators"]
