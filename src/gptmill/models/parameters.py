"""Parameter counts by part of the model, from the config alone. Every printed count comes from here.

A model with parts of a plug-in is built, without memory for its weights, and counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptmill.config.model import Gelu, LayerNorm, LearnedPositions, ModelConfig, Moe, Relu2
from gptmill.models.built_shapes import list_shapes


@dataclass(frozen=True)
class ParameterCount:
    """The parameters of each part of the model; a head tied to the token embedding has none."""

    token_embedding: int
    position_embedding: int
    value_embeddings: int
    blocks: int
    final_norm: int
    head: int
    mtp_heads: int
    inactive_experts: int
    """The part of `blocks` in experts that a token is not routed to."""

    @property
    def total(self) -> int:
        embeddings = self.token_embedding + self.position_embedding + self.value_embeddings
        return embeddings + self.blocks + self.final_norm + self.head + self.mtp_heads

    @property
    def active(self) -> int:
        """The parameters that take part in predicting one token."""
        return self.total - self.mtp_heads - self.inactive_experts


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Counts the parameters of `GPT(config, vocab_size)`."""
    if config.own_parts:
        return _count_built(config, vocab_size)
    width, block = config.embd_size, _count_block(config)
    value_gates = 2 * config.value_embeddings * config.kv_heads
    return ParameterCount(
        token_embedding=vocab_size * width,
        position_embedding=config.context_length * width if isinstance(config.positions, LearnedPositions) else 0,
        value_embeddings=config.value_embeddings * vocab_size * config.kv_heads * config.head_width,
        blocks=config.num_layers * block + value_gates,
        final_norm=_count_norm(config),
        head=0 if config.tied_head else vocab_size * width,
        mtp_heads=config.mtp_heads * block,
        inactive_experts=config.num_layers * _count_inactive(config),
    )


def count_own_matrices(config: ModelConfig, vocab_size: int) -> int:
    """The weights of a plug-in's architecture, without vectors; look-up tables cannot be told from other matrices."""
    return _sum_sizes(config, vocab_size, "", least_dims=2)


def count_block_matrices(config: ModelConfig) -> int:
    """The weights of a block's GEMMs for one token: of experts, those that it is routed to."""
    if config.own_parts:
        return _sum_sizes(config, 1, "blocks.0.", least_dims=2) - _count_inactive(config)
    moe, linears = config.feed_forward, sum(inputs * outputs for inputs, outputs in _list_linears(config))
    return linears + (_count_moe(config, moe, moe.experts_per_token) if isinstance(moe, Moe) else 0)


def _count_built(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Counts a model with parts of a plug-in; all of an architecture of the user's own counts as blocks."""
    return ParameterCount(
        token_embedding=_sum_sizes(config, vocab_size, "token_embedding."),
        position_embedding=_sum_sizes(config, vocab_size, "position_embedding."),
        value_embeddings=_sum_sizes(config, vocab_size, "value_embeddings."),
        blocks=_sum_sizes(config, vocab_size, ("blocks.", "module.")),
        final_norm=_sum_sizes(config, vocab_size, "final_norm."),
        head=_sum_sizes(config, vocab_size, "head."),
        mtp_heads=_sum_sizes(config, vocab_size, "extra_blocks."),
        inactive_experts=config.num_layers * _count_inactive(config),
    )


def _sum_sizes(config: ModelConfig, vocab_size: int, prefix: str | tuple[str, ...], least_dims: int = 0) -> int:
    """The parameters whose names begin so and that have at least so many dimensions, in the built model."""
    shapes = list_shapes(config, vocab_size)
    return sum(
        math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix) and len(shape) >= least_dims
    )


def _count_inactive(config: ModelConfig) -> int:
    """The parameters of a block in experts that a token is not routed to."""
    moe = config.feed_forward
    is_moe = isinstance(moe, Moe) and "architecture" not in config.own_parts
    return (moe.num_experts - moe.experts_per_token) * _count_expert(config) if is_moe else 0  # type: ignore[union-attr]


def _count_block(config: ModelConfig) -> int:
    moe, linears = (
        config.feed_forward,
        sum((inputs + config.bias) * outputs for inputs, outputs in _list_linears(config)),
    )
    experts = _count_moe(config, moe, moe.num_experts) if isinstance(moe, Moe) else 0
    head_norms = 2 * config.head_width if config.qk_norm else 0
    return linears + experts + head_norms + 2 * _count_norm(config)


def _list_linears(config: ModelConfig) -> list[tuple[int, int]]:
    """Input and output widths of a block's linear layers, without experts, which have no biases."""
    width, hidden = config.embd_size, config.hidden_size
    queries, pairs = config.num_heads * config.head_width, 2 * config.kv_heads * config.head_width
    attention = [(width, queries + pairs), (queries, width)]
    if isinstance(config.feed_forward, Moe):
        return attention
    branches = 1 if isinstance(config.feed_forward, Gelu | Relu2) else 2
    return [*attention, (width, branches * hidden), (hidden, width)]


def _count_moe(config: ModelConfig, moe: Moe, num_experts: int) -> int:
    """The router, and `num_experts` of its experts."""
    return config.embd_size * moe.num_experts + num_experts * _count_expert(config)


def _count_expert(config: ModelConfig) -> int:
    return 3 * config.embd_size * config.hidden_size


def _count_norm(config: ModelConfig) -> int:
    has_bias = isinstance(config.norm, LayerNorm) and config.norm.norm_bias
    return (1 + has_bias) * config.embd_size
