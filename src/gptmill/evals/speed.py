"""Tokens per second of a model on its device: generation of one text, and the forward pass over whole windows."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gptmill.inference.generator import SamplingConfig, generate
from gptmill.models.language_model import LanguageModel
from gptmill.runtime.precision import choose_precision, make_autocast

GENERATED = 64
ROUNDS = 3
SECONDS = 20.0  # of all rounds of one measurement; the first round always ends


def measure_generation(model: LanguageModel, vocab_size: int) -> float:
    """Tokens per second of greedy decoding with a KV cache at batch size 1; the best of a few rounds."""
    count = min(GENERATED, max(1, model.config.context_length - 1))

    def run() -> None:
        for _ in generate(model, [0], count, SamplingConfig(temperature=0.0), vocab_size, seed=0):
            pass

    return count / _time_best(run, model)


def measure_forward(model: LanguageModel, vocab_size: int) -> float:
    """Tokens per second of the logits of one full window, in the precision of evaluation."""
    device = next(model.parameters()).device
    tokens_1T = torch.randint(vocab_size, (1, model.config.context_length), generator=torch.Generator().manual_seed(0))
    tokens_1T, precision = tokens_1T.to(device), choose_precision("auto", device)

    @torch.no_grad()
    def run() -> None:
        with make_autocast(precision, device):
            model.logits(tokens_1T)

    return tokens_1T.numel() / _time_best(run, model)


def _time_best(run: Callable[[], None], model: LanguageModel) -> float:
    """Seconds of the fastest round, after one to warm up."""
    device = next(model.parameters()).device
    best, deadline = float("inf"), time.monotonic() + SECONDS
    for number in range(ROUNDS + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        best = seconds if number <= 1 else min(best, seconds)
        if time.monotonic() > deadline:
            break
    return max(best, 1e-9)
