"""Tokens per second of models on their device: generation of one text, and the forward pass over a whole window.

Models are measured in alternation, so that a machine that is busy for a while slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gptmill.inference.generator import generate
from gptmill.inference.loading import LoadedModel
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.runtime.precision import choose_precision, make_autocast

GENERATED = 64
ROUNDS = 5
SECONDS = 30.0  # after which no further round begins


@dataclass(frozen=True)
class Speed:
    """Tokens per second, each in the fastest of a few rounds."""

    generation: float
    """Greedy decoding with a KV cache at batch size 1."""
    forward: float
    """The logits of one full window, in the precision of evaluation."""


def measure_speeds(models: Sequence[LoadedModel]) -> list[Speed]:
    """The speeds of the models, in their order."""
    generation = _time_best([_make_generation(loaded) for loaded in models])
    forward = _time_best([_make_forward(loaded) for loaded in models])
    return [
        Speed(_count_generated(loaded) / slow, loaded.model.config.context_length / fast)
        for loaded, slow, fast in zip(models, generation, forward, strict=True)
    ]


def _count_generated(loaded: LoadedModel) -> int:
    return min(GENERATED, max(1, loaded.model.config.context_length - 1))


def _make_generation(loaded: LoadedModel) -> Callable[[], None]:
    count, greedy = _count_generated(loaded), SamplingConfig(temperature=0.0)
    prompt, vocab_size = [loaded.tokenizer.end_of_text], loaded.tokenizer.vocab_size

    def run() -> None:
        for _ in generate(loaded.model, prompt, count, greedy, vocab_size, seed=0):
            pass

    return run


def _make_forward(loaded: LoadedModel) -> Callable[[], None]:
    device = next(loaded.model.parameters()).device
    shape, precision = (1, loaded.model.config.context_length), choose_precision("auto", device)
    generator = torch.Generator().manual_seed(0)
    tokens_1T = torch.randint(loaded.tokenizer.vocab_size, shape, generator=generator).to(device)

    @torch.no_grad()
    def run() -> None:
        with make_autocast(precision, device):
            loaded.model.logits(tokens_1T)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _time_best(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of the fastest round of each, after one to warm up."""
    for run in runs:
        run()
    best, deadline = [float("inf")] * len(runs), time.monotonic() + SECONDS
    for number in range(ROUNDS):
        if number and time.monotonic() > deadline:
            break
        for index, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[index] = min(best[index], max(time.perf_counter() - started, 1e-9))
    return best
