"""FLOPs of training, from the config alone. Every model FLOPs utilisation (MFU) is computed from this count."""

from __future__ import annotations

from gptmill.config.model import ModelConfig
from gptmill.models.parameters import count_block_matrices, count_own_matrices

FLOPS_PER_WEIGHT = 6  # a multiplication and an addition, once in the forward and twice in the backward pass
FLOPS_PER_PAIR = 2 * FLOPS_PER_WEIGHT  # per query, key and channel: the score, and the weighted value


def count_flops(config: ModelConfig, vocab_size: int, context_length: int) -> float:
    """FLOPs of the GEMMs for one trained token, forward and backward, in windows of `context_length`.

    Attention counts every position of a layer's window, future ones too, as in PaLM (arXiv:2204.02311, appendix B). Of
    experts, those count that a token is routed to. Recomputed activations count once; embedding look-ups, norms and
    biases do not count. `vocab_size` includes padding. Of an architecture of the user's own, only its matrices count.
    """
    if "architecture" in config.own_parts:
        return float(FLOPS_PER_WEIGHT * count_own_matrices(config, vocab_size))
    windows = [*config.list_windows(), *[None] * config.mtp_heads]
    positions = sum(min(window or context_length, context_length) for window in windows)
    heads = 1 + config.mtp_heads
    weights = len(windows) * count_block_matrices(config) + heads * vocab_size * config.embd_size
    return float(FLOPS_PER_WEIGHT * weights + FLOPS_PER_PAIR * config.num_heads * config.head_width * positions)
