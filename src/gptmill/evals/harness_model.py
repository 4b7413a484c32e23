"""A model as lm-evaluation-harness calls it. Knows the harness' requests, but does not import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gptmill.config.run import PrecisionName
from gptmill.evals.likelihood import LikelihoodScorer, Report
from gptmill.evals.prompts import Request
from gptmill.evals.request_encoding import Sequences
from gptmill.inference.generator import BatchGenerator
from gptmill.inference.model import Model
from gptmill.inference.text_builder import TextBuilder
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.runtime.world import World

SEED = 42  # of samples, where a task asks for them
BATCH_SIZE = 32  # texts generated together
MAX_NEW_TOKENS = 256  # where a task does not say; the harness' default


class Instance(Protocol):
    """What the harness asks; its arguments depend on the method."""

    args: tuple[Any, ...]


class HarnessModel:
    """Has the attributes and methods of the harness' class LM."""

    rank = 0
    world_size = 1

    def __init__(
        self, model: Model, report: Report = lambda _done, _total: None, precision: PrecisionName = "auto"
    ) -> None:
        self.device = model.device
        self._model = model
        self._scorer = LikelihoodScorer(model.module, model.tokenizer, World(0, 1, model.device), precision=precision)
        self._report = report

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """The log-probability of each (context, continuation), and whether greedy decoding would give it."""
        found = self._scorer.score([Request(*request.args) for request in requests], self._report)
        return list(zip(found.logprobs.tolist(), found.is_greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """The log-probability of each whole text."""
        length = self._model.config.context_length
        texts = [cut_windows(self._model.encode_document(*request.args), length) for request in requests]
        windows = [window for text in texts for window in text]
        if not windows:
            return [0.0] * len(requests)
        scored = np.array([window.scored for window in windows], dtype=np.int64)
        sequences = Sequences([window.ids for window in windows], scored, num_cropped=0)
        logprobs = self._scorer.score_sequences(sequences, self._report).logprobs
        ends = np.cumsum([len(text) for text in texts])
        return [float(own.sum()) for own in np.split(logprobs, ends[:-1])]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """What follows each (context, options), up to one of the stop strings in its options."""
        alike: dict[tuple[SamplingConfig, int], list[int]] = {}
        for number, request in enumerate(requests):
            _, options = request.args
            alike.setdefault((make_sampling(options), find_max_tokens(options)), []).append(number)
        texts: dict[int, str] = {}
        for (sampling, count), numbers in alike.items():
            numbers.sort(key=lambda number: len(requests[number].args[0]))  # batches of similar length
            model, size = self._model, self._model.tokenizer.vocab_size
            generator = BatchGenerator(model.module, sampling, size, overflow="half", use_graphs=False)
            for first in range(0, len(numbers), BATCH_SIZE):
                batch = numbers[first : first + BATCH_SIZE]
                found = self._generate(generator, [requests[number].args for number in batch], count)
                texts |= zip(batch, found, strict=True)
                self._report(len(texts), len(requests))
        return [texts[number] for number in range(len(requests))]

    def _generate(self, generator: BatchGenerator, asked: Sequence[tuple[Any, ...]], count: int) -> list[str]:
        model, tokenizer = self._model, self._model.tokenizer
        kept = max(1, model.config.context_length - count)
        prompts = [(model.encode(context) or [tokenizer.end_of_text])[-kept:] for context, _ in asked]
        builders = [TextBuilder(tokenizer, list_stops(options)) for _, options in asked]
        for step in generator.generate(prompts, count, [SEED] * len(asked)):
            for builder, token in zip(builders, step.tokens, strict=True):
                builder.add(token)
            if all(builder.finish_reason is not None for builder in builders):
                break
        for builder in builders:
            builder.finish()
        return [builder.text for builder in builders]


@dataclass(frozen=True)
class Window:
    """Tokens of a text; the last `scored` of them are predicted from those before."""

    ids: NDArray[np.int64]
    scored: int


def cut_windows(document: Sequence[int], context_length: int) -> list[Window]:
    """Windows that predict every token but the first once; the last one reaches back to fill the context."""
    ids, windows, done = np.array(document, dtype=np.int64), list[Window](), 0
    while done < len(ids) - 1:
        end = min(len(ids) - 1, done + context_length)
        windows.append(Window(ids[max(0, end - context_length) : end + 1], end - done))
        done = end
    return windows


def list_stops(options: Mapping[str, Any]) -> list[str]:
    stops = options.get("until") or []
    return [stops] if isinstance(stops, str) else [stop for stop in stops if stop]


def make_sampling(options: Mapping[str, Any]) -> SamplingConfig:
    """The harness' options of generation: greedy unless they ask for samples."""
    temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
    return SamplingConfig(temperature, options.get("top_k") or None, options.get("top_p"))


def find_max_tokens(options: Mapping[str, Any]) -> int:
    """How many tokens to generate; the harness passes on whatever name a task uses."""
    aliases = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    return int(next((options[name] for name in aliases if options.get(name) is not None), MAX_NEW_TOKENS))
