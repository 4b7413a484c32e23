"""Samples during training: the quickest way for a person to see what the model has learnt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from gptmill.config.errors import UserError
from gptmill.config.run import EvaluationConfig
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import decode
from gptmill.inference.generator import SamplingRule, generate
from gptmill.models.gpt import GPT
from gptmill.runs.events import SampleDrawn
from gptmill.runtime.world import World

RULE = SamplingRule(temperature=0.8, top_k=50)
# Tokens that a run has drawn. On two CPU cores, to compile 12 narrow layers takes 23 s, and saves 5 ms a token.
COMPILED_FROM = 4_000


class Samples:
    """One continuation of the prompt, from the same seed every time; drawn on the main rank alone.

    Where the run is compiled, so are they, once there have been so many that it pays: known by the step alone, so that
    a run that was interrupted writes the same.
    """

    def __init__(
        self, config: EvaluationConfig, tokenizer: Tokenizer, seed: int, world: World, *, compiled: bool = False
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._is_main = world.is_main
        self._compiled = compiled
        try:
            self._prompt = [tokenizer.end_of_text, *tokenizer.encode(config.sample_prompt).tolist()]
        except UserError as error:
            raise UserError(f"sample_prompt = {config.sample_prompt!r}: {error}") from None

    def evaluate(self, model: GPT, step: int, is_stopped: Callable[[], bool]) -> SampleDrawn | None:
        if not self._is_main:
            return None
        count, vocab_size = self._config.sample_tokens, self._tokenizer.vocab_size
        compiled = self._compiled and step // self._config.eval_freq * count >= COMPILED_FROM
        tokens = generate(model, self._prompt, count, RULE, vocab_size, self._seed, compiled=compiled)
        end = self._tokenizer.end_of_text
        document = list(takewhile(lambda token: token != end and not is_stopped(), tokens))
        return SampleDrawn(step, self._config.sample_prompt, decode(self._tokenizer, document))
