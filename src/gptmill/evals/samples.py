"""Text samples during training: some from each rank, in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import takewhile

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.run import EvaluationConfig
from gptmill.config.validation import MAX_SEED
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import decode
from gptmill.inference.generator import generate_batch
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.language_model import LanguageModel
from gptmill.runs.events import SampleDrawn
from gptmill.runtime.world import World

# Decode steps after which compiling pays off: for 12 narrow layers on two CPU cores it takes 23 s and saves 5 ms a
# step.
COMPILE_AFTER_STEPS = 4_000
MAX_RANKS = 8  # that sample: a node of GPUs. Nobody reads the samples of a thousand.
SEEDS_PER_SAMPLE = 1 << 20  # more than there are ranks


class Samples:
    """Continues the prompt several times, with the same seeds every time. Each rank has its own ones.

    Where a forward pass needs all ranks, all of them sample the same; the number of passes depends on nothing that is
    sampled, so that none is left waiting.

    In a compiled run, generation is compiled too once there were enough decode steps. That depends on the step alone,
    so that a resumed run samples the same texts.
    """

    def __init__(self, config: EvaluationConfig, tokenizer: Tokenizer, world: World, *, compiled: bool = False) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._world = world
        self._is_together = world.shards_weights
        self._num_ranks = 1 if self._is_together else min(world.size, MAX_RANKS)
        self._compiled = compiled
        self._sampling = SamplingConfig(config.sample_temperature, config.sample_top_k)
        try:
            prompt = tokenizer.encode(config.sample_prompt).tolist()
        except UserError as error:
            raise UserError(f"sample_prompt = {config.sample_prompt!r}: {error}") from None
        self._prompt = [tokenizer.end_of_text, *prompt]
        self._num_new = count_new_tokens(config.sample_tokens, len(prompt))

    def evaluate(self, model: LanguageModel, step: int, is_stopped: Callable[[], bool]) -> SampleDrawn | None:
        rank = 0 if self._is_together else self._world.rank
        sampled_RNS = torch.zeros(self._num_ranks, self._config.num_samples, self._num_new, dtype=torch.int64)
        if rank < self._num_ranks:
            self._fill(sampled_RNS[rank], self._generate(model, step, rank), is_stopped)
        if self._num_ranks > 1:
            # Exact: all other summands are 0. Every rank takes part, also one that was stopped.
            sampled_RNS = self._world.all_reduce_sum(sampled_RNS.to(self._world.device)).cpu()
        if not self._world.is_main:
            return None
        first, *more = [self._read(row) for row in sampled_RNS.flatten(0, 1).tolist()]
        return SampleDrawn(step, self._config.sample_prompt, first, more, self._config.num_samples)

    def _fill(self, sampled_NS: Tensor, steps: Iterable[list[int]], is_stopped: Callable[[], bool]) -> None:
        """Writes each token plus one, so that 0 stands for none."""
        end, is_open_N = self._tokenizer.end_of_text, torch.ones(len(sampled_NS), dtype=torch.bool)
        for column, tokens in enumerate(steps):
            if is_stopped():
                break
            sampled_NS[:, column] = torch.tensor(tokens) + 1
            is_open_N &= sampled_NS[:, column] != end + 1
            if not is_open_N.any() and not self._is_together:
                break

    def _read(self, row: list[int]) -> str:
        """The text up to the end of the document."""
        stops = (0, self._tokenizer.end_of_text + 1)
        return decode(self._tokenizer, [token - 1 for token in takewhile(lambda token: token not in stops, row)])

    def _generate(self, model: LanguageModel, step: int, rank: int) -> Iterable[list[int]]:
        config = self._config
        prompts = [self._prompt] * config.num_samples
        seeds = [make_sample_seed(config.sample_seed, rank, number) for number in range(config.num_samples)]
        arguments = (model, prompts, self._num_new, self._sampling, self._tokenizer.vocab_size, seeds)
        if not self._is_together:
            compiled = self._compiled and step // config.eval_freq * self._num_new >= COMPILE_AFTER_STEPS
            return generate_batch(*arguments, compiled=compiled)
        # Each token by a whole forward pass. In eager mode: every length would be compiled anew.
        with torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
            return list(generate_batch(*arguments, use_cache=False))


def count_new_tokens(sample_tokens: int, prompt_tokens: int) -> int:
    """What the prompt leaves of a sample, or half of it: a prompt in bytes is long."""
    return max(sample_tokens - prompt_tokens, (sample_tokens + 1) // 2)


def make_sample_seed(seed: int, rank: int, number: int) -> int:
    """The seed of a sample: of the first one `seed` + rank, and different for every rank and number."""
    return (seed + rank + number * SEEDS_PER_SAMPLE) % (MAX_SEED + 1)
