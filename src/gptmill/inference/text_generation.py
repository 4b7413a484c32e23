"""Texts for prompts: generates them in batches, and hands out their pieces as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gptmill.config.errors import UserError
from gptmill.config.model import LearnedPositions
from gptmill.config.sample_request import SampleRequest
from gptmill.config.validation import MAX_SEED
from gptmill.data.tokenizers import Tokenizer
from gptmill.inference.generator import BatchGenerator
from gptmill.inference.self_speculation import pays_to_speculate
from gptmill.inference.text_builder import FinishReason, TextBuilder
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.language_model import LanguageModel

# Decode steps after which compiling for a GPU pays off.
COMPILE_AFTER_STEPS = 50_000


@dataclass(frozen=True)
class GeneratedText:
    """A text that follows a prompt."""

    text: str
    tokens: list[int]
    """All sampled tokens, those of a stop string and of the end of the document included."""
    log_probs: list[float] | None
    """Their log-probabilities by the model itself, before temperature and filters."""
    finish_reason: FinishReason


class TextGenerator:
    """A model with the options of a request."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, request: SampleRequest, num_texts: int = 1) -> None:
        """`num_texts` is how many will be wanted; compiling may then pay off."""
        if request.context == "rolling" and isinstance(model.config.positions, LearnedPositions):
            raise UserError("--context rolling needs RoPE, and this model has learned positions; use crop or half")
        is_cuda = next(model.parameters()).is_cuda
        steps = -(-num_texts // request.batch_size) * request.max_new_tokens
        pays = is_cuda and steps >= COMPILE_AFTER_STEPS
        self._tokenizer = tokenizer
        self._request = request
        self._generator = BatchGenerator(
            model,
            make_sampling_config(request),
            tokenizer.vocab_size,
            overflow=request.context,
            with_log_probs=request.json,
            compiled=pays if request.compile is None else request.compile,
            speculative=pays_to_speculate(model, num_texts * request.max_new_tokens),
        )

    def start(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> TextBatch:
        """Begins a batch of texts, as many as fit at a time."""
        return TextBatch(self._generator, self._tokenizer, self._request, prompts, seeds)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[GeneratedText]:
        """Any number of texts, in order."""
        size = self._request.batch_size
        for first in range(0, len(prompts), size):
            batch = self.start(prompts[first : first + size], seeds[first : first + size])
            for _ in batch.stream():
                pass
            yield from batch.texts


class TextBatch:
    """Texts that are generated together."""

    def __init__(
        self,
        generator: BatchGenerator,
        tokenizer: Tokenizer,
        request: SampleRequest,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
    ) -> None:
        self._steps = generator.generate(prompts, request.max_new_tokens, seeds)
        self._builders = [TextBuilder(tokenizer, request.stops) for _ in prompts]
        self.steps_done = 0
        """Tokens of each text that were sampled so far, if it has not ended."""

    @property
    def texts(self) -> list[GeneratedText]:
        """The texts as far as they have come."""
        return [
            GeneratedText(builder.text, builder.tokens, builder.log_probs or None, builder.finish_reason or "length")
            for builder in self._builders
        ]

    def has_ended(self, row: int) -> bool:
        return self._builders[row].finish_reason is not None

    def stream(self) -> Iterator[tuple[int, str]]:
        """Yields each new piece with the number of its text in the batch, until all have ended."""
        for step in self._steps:
            self.steps_done += 1
            for row, (builder, token) in enumerate(zip(self._builders, step.tokens, strict=True)):
                if piece := builder.add(token, None if step.log_probs is None else step.log_probs[row]):
                    yield row, piece
            if all(builder.finish_reason is not None for builder in self._builders):
                break
        self._steps.close()
        for row, builder in enumerate(self._builders):
            if piece := builder.finish():
                yield row, piece


def make_sampling_config(request: SampleRequest) -> SamplingConfig:
    return SamplingConfig(request.temperature, request.top_k, request.top_p, request.min_p, request.repetition_penalty)


def cast_weights(model: LanguageModel, dtype: torch.dtype) -> None:
    """Casts a model for generation. QK-norm stays in fp32, in which it is computed."""
    model.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(("query_norm", "key_norm")):
            module.float()


def choose_dtype(request: SampleRequest, device: torch.device) -> torch.dtype:
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    wanted = request.precision if request.precision != "auto" else "bf16" if has_bf16 else "fp32"
    return torch.bfloat16 if wanted == "bf16" else torch.float32


def find_sampling_rules(request: SampleRequest) -> dict[str, tuple[bool, str]]:
    """Whether each option can be used, and what it must be."""
    return {
        "num_samples": (request.num_samples >= 1, "must be at least 1"),
        "batch_size": (request.batch_size >= 1, "must be at least 1"),
        "max_new_tokens": (request.max_new_tokens >= 1, "must be at least 1"),
        "temperature": (request.temperature >= 0, "must not be negative"),
        "top_k": (request.top_k is None or request.top_k >= 1, "must be at least 1"),
        "top_p": (request.top_p is None or 0 < request.top_p <= 1, "must be above 0 and at most 1"),
        "min_p": (request.min_p is None or 0 <= request.min_p <= 1, "must lie between 0 and 1"),
        "repetition_penalty": (request.repetition_penalty > 0, "must be above 0; 1 is no penalty"),
        "stop": (all(request.stops), "must not be empty"),
        "seed": (0 <= request.seed <= MAX_SEED, f"must lie between 0 and {MAX_SEED}"),
    }


def describe(text: GeneratedText, prompt: str, seed: int) -> dict[str, Any]:
    """A sample as a JSON object."""
    return {
        "prompt": prompt,
        "text": text.text,
        "tokens": text.tokens,
        "log_probs": text.log_probs,
        "finish_reason": text.finish_reason,
        "seed": seed,
    }
