"""Parameter counts by part, from the config alone. Everything that prints a count takes it from here."""

from __future__ import annotations

from dataclasses import dataclass

from gptmill.config.run import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers each part of the model learns; the head is the token embedding and counted once."""

    token_embedding: int
    position_embedding: int
    blocks: int
    final_norm: int

    @property
    def total(self) -> int:
        return self.token_embedding + self.position_embedding + self.blocks + self.final_norm


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Counts what `GPT(config, vocab_size)` would hold."""
    width = config.embd_size
    attention = 4 * width * width + 4 * width
    mlp = 8 * width * width + 5 * width
    norm = 2 * width
    return ParameterCount(
        token_embedding=vocab_size * width,
        position_embedding=config.context_length * width,
        blocks=config.num_layers * (attention + mlp + 2 * norm),
        final_norm=norm,
    )
