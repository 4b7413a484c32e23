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
# 512 that read it 4 times did better than 4 of width 128 that read it 32 times.
DATA_DECAY, DECAY_DENSITY = 26.0, 5.7
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
# Each doubling of the context is worth 1.9 % of the loss on Python's library, where names come back from far above, and
# hardly anything on books: 0.3 %. So say sweeps from 500 to 4,000 bytes with models of 3 to 85 M weights.
USUAL_CONTEXT = 1024.0  # bytes
CONTEXT_POWER, CONTEXT_DENSITY = 0.004, -5.5
# What LZMA leaves of a byte: about 2.5 bits in English books. The law holds from Python's library, 1.8, to drama, 2.6.
USUAL_DENSITY, LEAST_DENSITY, MOST_DENSITY = 2.5, 1.75, 2.75


@dataclass(frozen=True)
class ScalingLaw:
    """bits per byte = floor + size_factor x V^size_vocab / N^size_power + data_factor x V^data_vocab / B^data_power.

    N are the weights of the blocks in millions, B the bytes trained on, with an offset, in millions, V the vocabulary
    over that of bytes. Each term grows with a power of the text's density, the bits that LZMA leaves of a byte. The sum
    is lower with a longer context, and higher where a model has too many weights and epochs for its text.
    """

    floor: float
    floor_density: float
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
        data = (DATA_OFFSET + find_data(trained_bytes, unique_bytes, known)) / 1e6
        floor = self.floor * relative**self.floor_density
        size_term = self.size_factor * relative**self.size_density * vocab**self.size_vocab * size**-self.size_power
        data_term = self.data_factor * relative**self.data_density * vocab**self.data_vocab * data**-self.data_power
        factor = density / known * find_overfitting(pressure) * find_context_factor(context_bytes, known)
        return float(factor * (floor + size_term + data_term))


def find_pressure(weights: float, tokens: float, unique_tokens: float) -> float:
    """How much a model is driven to learn its text by heart; `weights` are all of them, embeddings included."""
    epochs = tokens / unique_tokens
    return weights / unique_tokens * epochs**EPOCHS_POWER if epochs > 1 else 0.0


def find_overfitting(pressure: float) -> float:
    """The factor by which a model's loss is higher because it learns its text by heart."""
    return 1 + OVERFITTING_PER_DOUBLING * math.log2(max(1.0, pressure / FREE_PRESSURE))


def find_context_factor(context_bytes: float, density: float) -> float:
    """The factor by which a model's loss is higher, or lower, than with the usual context."""
    power = CONTEXT_POWER * (density / USUAL_DENSITY) ** CONTEXT_DENSITY
    return float((context_bytes / USUAL_CONTEXT) ** -power)


def find_data(trained_bytes: float, unique_bytes: float, density: float) -> float:
    """The bytes of new text that as many bytes of repeated text are worth."""
    decay = DATA_DECAY * (density / USUAL_DENSITY) ** DECAY_DENSITY
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
