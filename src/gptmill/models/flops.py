"""Floating-point operations of training, from the config alone. Every MFU is computed from this count."""

from __future__ import annotations

from gptmill.config.model import ModelConfig
from gptmill.models.parameters import count_block_matrices

PER_WEIGHT = 6  # a multiplication and an addition, once on the way forward and twice on the way back
PER_PAIR = 2 * PER_WEIGHT  # a query meets a key, and then its value


def count_flops(config: ModelConfig, vocab_size: int, context_length: int) -> float:
    """What the matmuls of one trained token take, forward and backward, in windows of `context_length`.

    Attention is counted as if every token saw all places of its layer's window, the future too (as PaLM has it,
    arXiv:2204.02311, appendix B); of experts, those that a token goes to. What is computed twice to save memory counts
    once, and look-ups, norms and biases do not count. `vocab_size` counts the rows that only pad too.
    """
    windows = [*config.list_windows(), *[None] * config.mtp_heads]
    seen = sum(min(window or context_length, context_length) for window in windows)
    heads = 1 + config.mtp_heads
    weights = len(windows) * count_block_matrices(config) + heads * vocab_size * config.embd_size
    return float(PER_WEIGHT * weights + PER_PAIR * config.num_heads * config.head_width * seen)
