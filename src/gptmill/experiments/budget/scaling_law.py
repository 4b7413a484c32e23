"""A scaling law: the loss that a model of some size reaches after some text, which it may have seen several times.

It follows Hoffmann et al. 2022 (arXiv:2203.15556) in the sum of a floor, a size and a data term, and Muennighoff et al.
2023 (arXiv:2305.16264) in how repeated data, and weights that the unique data is too little for, lose their worth.
Losses are bits per byte and data is counted in bytes, so that tokenizers compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTE_VOCAB = 256
# How many repetitions of data, and multiples of weights, are worth something: 15.39 and 5.31 with Muennighoff et al. In
# our runs, repetitions of text that is easy to predict lose their worth sooner: of Python's library, 8 layers of width
# 512 that read it 4 times did better than 4 of width 128 that read it 32 times. Those of large tokens do so, too: as
# bytes, 12 epochs of it instead of 3 still lowered the loss of 6 layers of width 384 by 9 %.
DATA_DECAY, DECAY_DENSITY, DECAY_VOCAB = 52.0, 5.7, -0.2
# A model learns little from its first megabyte: the loss falls slowly at first, then as a power of the data. Without
# this offset, the law expected too much of 0.8 M tokens, and preferred 3 layers of width 96 to 2 of width 64.
DATA_OFFSET = 0.7e6  # bytes
SIZE_DECAY = 5.31
# They count weights as in excess beyond the size that is best for the compute. That is too few with dropout: on 1 MB of
# Shakespeare, models of 10 to 14 M weights beat smaller ones.
WEIGHTS_PER_BYTE = 3.0
# The more weights per token of unique text, and the more epochs, the more a model learns its text by heart, whatever
# the dropout. Epochs count for more: 85 M weights that read Shakespeare 12 times did better than 11 M that read it 31
# times.
EPOCHS_POWER = 1.32
FREE_PRESSURE, OVERFITTING_PER_DOUBLING = 265.0, 0.045
# What a context lacks costs in proportion to its inverse. On Python's library, where names come back from far above,
# 500 bytes cost 6 % more than 4,000, and 256 cost 10 % more than 1,024; on books, 500 cost 0.9 % more than 4,000. So
# say models of 3 to 85 M weights. Models that have seen little text cannot use a long context yet.
USUAL_CONTEXT = 1024.0  # bytes
CONTEXT_COST, CONTEXT_DENSITY = 5.0, -5.5  # bytes
CONTEXT_LEARNING = 10e6  # bytes, after which a model uses half of what a context could give
# What LZMA leaves of a byte: about 2.5 bits in English books. The law holds from Python's library, 1.8, to drama, 2.6.
USUAL_DENSITY, LEAST_DENSITY, MOST_DENSITY = 2.5, 1.75, 2.75


@dataclass(frozen=True)
class ScalingLaw:
    """bits per byte = floor + size_factor x V^size_vocab / N^size_power + data_factor x V^data_vocab / B^data_power.

    N are the weights of the blocks in millions, B the bytes trained on, with an offset, in millions, V the vocabulary
    over that of bytes. Each term grows with a power of the text's density, the bits that LZMA leaves of a byte. In text
    that is easier to predict than books, tokens of several bytes raise the floor. The sum is lower with a longer
    context, and higher where a model has too many weights and epochs for its text.
    """

    floor: float
    floor_density: float
    floor_vocab: float
    size_factor: float
    size_power: float
    size_vocab: float
    size_density: float
    data_factor: float
    data_power: float
    data_vocab: float
    data_density: float
    spread: float
    """Standard deviation of the logarithm of measured over predicted losses."""

    def predict(
        self,
        weights: float,
        trained_bytes: float,
        unique_bytes: float,
        vocab_size: float,
        density: float,
        pressure: float = 0.0,
        context_bytes: float = USUAL_CONTEXT,
    ) -> float:
        """Bits per byte on text that was not trained on; `pressure` is what find_pressure() says."""
        known = min(max(density, LEAST_DENSITY), MOST_DENSITY)  # beyond, the loss is in proportion to the density
        relative, vocab = known / USUAL_DENSITY, vocab_size / BYTE_VOCAB
        size = find_size(weights, unique_bytes) / 1e6
        data = (DATA_OFFSET + find_data(trained_bytes, unique_bytes, vocab_size, known)) / 1e6
        floor = self.floor * relative**self.floor_density * math.exp(self.floor_vocab * find_coarseness(vocab, known))
        size_term = self.size_factor * relative**self.size_density * vocab**self.size_vocab * size**-self.size_power
        data_term = self.data_factor * relative**self.data_density * vocab**self.data_vocab * data**-self.data_power
        context_factor = find_context_factor(context_bytes, trained_bytes, known)
        factor = density / known * find_overfitting(pressure) * context_factor
        return float(factor * (floor + size_term + data_term))


def find_coarseness(vocab: float, density: float) -> float:
    """By how much tokens of several bytes, in a text that is easier to predict than books, keep a model from its floor.

    It is the logarithm of the densities' ratio, and most of it comes with the first tokens: of Python's library, 8
    layers of width 512 reached about the same with 1,024 tokens as with 8,192.
    """
    return max(0.0, math.log(USUAL_DENSITY / density)) * max(0.0, 1 - 1 / vocab)


def find_pressure(weights: float, tokens: float, unique_tokens: float) -> float:
    """How much a model is driven to learn its text by heart; `weights` are all of them, embeddings included."""
    epochs = tokens / unique_tokens
    return weights / unique_tokens * epochs**EPOCHS_POWER if epochs > 1 else 0.0


def find_overfitting(pressure: float) -> float:
    """The factor by which a model's loss is higher because it learns its text by heart."""
    return 1 + OVERFITTING_PER_DOUBLING * math.log2(max(1.0, pressure / FREE_PRESSURE))


def find_context_factor(context_bytes: float, trained_bytes: float, density: float) -> float:
    """The factor by which a model's loss is higher than with a boundless context."""
    cost = CONTEXT_COST * (density / USUAL_DENSITY) ** CONTEXT_DENSITY
    return float(1 + cost / context_bytes * trained_bytes / (trained_bytes + CONTEXT_LEARNING))


def find_data(trained_bytes: float, unique_bytes: float, vocab_size: float, density: float) -> float:
    """The bytes of new text that as many bytes of repeated text are worth."""
    decay = DATA_DECAY * (density / USUAL_DENSITY) ** DECAY_DENSITY * (vocab_size / BYTE_VOCAB) ** DECAY_VOCAB
    return saturate(trained_bytes, min(trained_bytes, unique_bytes), decay)


def find_size(weights: float, unique_bytes: float) -> float:
    """The weights that are of use with so much unique text."""
    return saturate(weights, min(weights, WEIGHTS_PER_BYTE * unique_bytes), SIZE_DECAY)


def saturate(amount: float, unique: float, decay: float) -> float:
    """What `amount` is worth in units of its first `unique` part, of which all else is a repetition."""
    if amount <= unique:
        return amount
    repeats = amount / unique - 1
    return unique * (1 + decay * (1 - math.exp(-repeats / decay)))
