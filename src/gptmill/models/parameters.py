"""Parameter counts by part, from the config alone. Everything that prints a count takes it from here."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.model import Gelu, LayerNorm, LearnedPositions, ModelConfig, Moe, Relu2


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers each part of the model learns; a head that is the token embedding counts nothing."""

    token_embedding: int
    position_embedding: int
    value_embeddings: int
    blocks: int
    final_norm: int
    head: int
    extra_heads: int
    idle: int
    """Of the blocks', those of the experts that a token does not go to."""

    @property
    def total(self) -> int:
        embeddings = self.token_embedding + self.position_embedding + self.value_embeddings
        return embeddings + self.blocks + self.final_norm + self.head + self.extra_heads

    @property
    def active(self) -> int:
        """Those that have a part in predicting one token."""
        return self.total - self.extra_heads - self.idle


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Counts what `GPT(config, vocab_size)` would hold."""
    width, block = config.embd_size, _count_block(config)
    moe = config.feed_forward
    idle = (moe.num_experts - moe.experts_per_token) * _count_expert(config) if isinstance(moe, Moe) else 0
    value_gates = 2 * config.value_embeddings * config.kv_heads
    return ParameterCount(
        token_embedding=vocab_size * width,
        position_embedding=config.context_length * width if isinstance(config.positions, LearnedPositions) else 0,
        value_embeddings=config.value_embeddings * vocab_size * config.kv_heads * config.head_width,
        blocks=config.num_layers * block + value_gates,
        final_norm=_count_norm(config),
        head=0 if config.tied_head else vocab_size * width,
        extra_heads=config.extra_heads * block,
        idle=config.num_layers * idle,
    )


def _count_block(config: ModelConfig) -> int:
    queries, pairs = config.num_heads * config.head_width, 2 * config.kv_heads * config.head_width
    attention = _count_linear(config, config.embd_size, queries + pairs) + _count_linear(
        config, queries, config.embd_size
    )
    head_norms = 2 * config.head_width if config.qk_norm else 0
    return attention + head_norms + _count_feed_forward(config) + 2 * _count_norm(config)


def _count_feed_forward(config: ModelConfig) -> int:
    width, hidden = config.embd_size, config.hidden_size
    if isinstance(config.feed_forward, Moe):
        return config.feed_forward.num_experts * (width + _count_expert(config))
    branches = 1 if isinstance(config.feed_forward, Gelu | Relu2) else 2
    return _count_linear(config, width, branches * hidden) + _count_linear(config, hidden, width)


def _count_expert(config: ModelConfig) -> int:
    return 3 * config.embd_size * config.hidden_size


def _count_linear(config: ModelConfig, inputs: int, outputs: int) -> int:
    return (inputs + config.bias) * outputs


def _count_norm(config: ModelConfig) -> int:
    has_bias = isinstance(config.norm, LayerNorm) and config.norm.norm_bias
    return (1 + has_bias) * config.embd_size
