"""Text samples during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import takewhile

import torch

from gptmill.config.errors import UserError
from gptmill.config.run import EvaluationConfig
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import decode
from gptmill.inference.generator import generate
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.language_model import LanguageModel
from gptmill.runs.events import SampleDrawn
from gptmill.runtime.world import World

SAMPLING = SamplingConfig(temperature=0.8, top_k=50)
# Sampled tokens after which compiling pays off: for 12 narrow layers on two CPU cores it takes 23 s and saves 5 ms a
# token.
COMPILE_AFTER_TOKENS = 4_000


class Samples:
    """Samples one continuation of the prompt on rank 0, with the same seed every time.

    Where a forward pass needs all ranks, all of them sample the same; the number of passes depends on nothing that is
    sampled, so that none is left waiting.

    In a compiled run, generation is compiled too once enough tokens have been sampled. That depends on the step alone,
    so that a resumed run samples the same text.
    """

    def __init__(
        self, config: EvaluationConfig, tokenizer: Tokenizer, seed: int, world: World, *, compiled: bool = False
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._is_main = world.is_main
        self._needs_all_ranks = world.shards_weights
        self._compiled = compiled
        try:
            self._prompt = [tokenizer.end_of_text, *tokenizer.encode(config.sample_prompt).tolist()]
        except UserError as error:
            raise UserError(f"sample_prompt = {config.sample_prompt!r}: {error}") from None

    def evaluate(self, model: LanguageModel, step: int, is_stopped: Callable[[], bool]) -> SampleDrawn | None:
        tokens: Iterable[int] = ()
        if self._needs_all_ranks:
            tokens = self._generate_together(model)
        elif self._is_main:
            tokens = self._generate(model, step)
        end = self._tokenizer.end_of_text
        document = list(takewhile(lambda token: token != end and not is_stopped(), tokens))
        if not self._is_main:
            return None
        return SampleDrawn(step, self._config.sample_prompt, decode(self._tokenizer, document))

    def _generate(self, model: LanguageModel, step: int) -> Iterable[int]:
        count, vocab_size = self._config.sample_tokens, self._tokenizer.vocab_size
        compiled = self._compiled and step // self._config.eval_freq * count >= COMPILE_AFTER_TOKENS
        return generate(model, self._prompt, count, SAMPLING, vocab_size, self._seed, compiled=compiled)

    def _generate_together(self, model: LanguageModel) -> list[int]:
        """All tokens, each by a whole forward pass. In eager mode: every length would be compiled anew."""
        count, vocab_size = self._config.sample_tokens, self._tokenizer.vocab_size
        with torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
            return list(generate(model, self._prompt, count, SAMPLING, vocab_size, self._seed, use_cache=False))
