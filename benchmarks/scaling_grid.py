"""The runs that the scaling law is fitted on, the most useful first."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from texts import CORPORA

from gptmill.experiments.budget.candidate import choose_dropout, count_weights
from gptmill.experiments.budget.corpus_sample import MIN_BYTES_PER_ENTRY
from gptmill.experiments.budget.family import Shape

TINY, SMALL, MEDIUM, LARGE = Shape(2, 64), Shape(3, 96), Shape(4, 128), Shape(6, 192)
LARGER, WIDE, WIDER, DEEPER, GPT2 = Shape(8, 256), Shape(8, 384), Shape(8, 512), Shape(12, 512), Shape(12, 768)
FRONTIERS = {
    4e12: (TINY, SMALL, MEDIUM, LARGE),
    1.6e13: (TINY, SMALL, MEDIUM, LARGE, LARGER),
    6.4e13: (SMALL, MEDIUM, LARGE, LARGER, WIDE),
    2.6e14: (MEDIUM, LARGE, LARGER, WIDE),
}
"""Compute and the sizes that share it: from a minute of two CPU cores to an hour. A GPU soon repeats its text."""
# What a core does in a minute, a slow and a fast one, in less than four and in fifteen: there, much depends on the
# vocabulary.
SHORT = (
    (8e11, (TINY, SMALL), (4096, 2048, 8192, 1024)),
    (1.6e12, (TINY, SMALL), (4096, 2048, 8192, 1024)),
    (4e12, (TINY, SMALL), (4096, 2048, 8192, 1024)),
    (1.6e13, (SMALL, Shape(4, 96), MEDIUM), (4096, 2048, 8192)),
)
LEVELS = sorted({*FRONTIERS, *(flops for flops, _, _ in SHORT)})
TRAIN_BYTES = {"books": 12e6, "shakespeare": 1e6, "python": 12e6}
# Shape, epochs and dropouts of runs that read their text again and again, as a large GPU does.
REPEATED = {
    "shakespeare": (
        (MEDIUM, 16, (0.0, 0.1)), (MEDIUM, 32, (0.1, 0.2)), (MEDIUM, 64, (0.1, 0.2)),
        (LARGE, 8, (0.0, 0.1)), (LARGE, 16, (0.1, 0.2)), (LARGE, 32, (0.2, 0.3)), (LARGE, 64, (0.3,)),
        (LARGER, 8, (0.1, 0.2)), (LARGER, 16, (0.2, 0.3)), (LARGER, 32, (0.3, 0.4)),
        (WIDE, 4, (0.0, 0.1)), (WIDE, 8, (0.2, 0.3)), (WIDE, 16, (0.3, 0.4)), (WIDE, 32, (0.4,)),
    ),
    "books": (
        (LARGE, 4, (0.0,)), (LARGE, 16, (0.0, 0.1)), (LARGE, 32, (0.1,)),
        (LARGER, 2, (0.0,)), (LARGER, 8, (0.0, 0.1)), (LARGER, 16, (0.1, 0.2)), (LARGER, 32, (0.2,)),
        (WIDE, 4, (0.0,)), (WIDE, 8, (0.1, 0.2)), (WIDE, 16, (0.2,)),
        (WIDER, 4, (0.1,)), (WIDER, 8, (0.2,)), (WIDER, 16, (0.2, 0.3)),
        (GPT2, 4, (0.1,)), (GPT2, 8, (0.3,)),
    ),
    "python": (
        (LARGE, 4, (0.0,)), (LARGE, 16, (0.0,)), (LARGE, 32, (0.1,)),
        (LARGER, 8, (0.0, 0.1)), (LARGER, 16, (0.1,)), (LARGER, 32, (0.2,)),
        (WIDE, 4, (0.0,)), (WIDE, 8, (0.1,)), (WIDE, 16, (0.2,)),
        (WIDER, 4, (0.1,)), (WIDER, 8, (0.2,)), (WIDER, 16, (0.2,)),
    ),
}  # fmt: skip
# Runs of a minute or two, whose batch decides more than that of a long one: tokens, corpora and vocabularies.
FEW_TOKENS = (400_000, 800_000, 1_600_000)
FEW_TOKENS_OF = (("python", 2048), ("books", 4096), ("shakespeare", 4096))
# Runs for a whole GPU, some of which differ in nothing but the context: corpus, vocabulary, shape, tokens, dropout and
# contexts.
LONG = (
    ("python", 8192, LARGE, 15_000_000, 0.0, (128, 256, 512)),
    ("books", 8192, LARGE, 15_000_000, 0.0, (128, 256, 512)),
    ("python", 8192, WIDER, 25_000_000, 0.2, (256, 512, 1024)),
    ("books", 8192, WIDER, 29_000_000, 0.2, (256, 512, 1024)),
    ("shakespeare", 256, Shape(6, 256), 19_000_000, 0.25, (256, 512, 1024)),
    ("shakespeare", 1024, Shape(6, 256), 6_000_000, 0.25, (256, 512)),
    ("python", 8192, GPT2, 13_200_000, 0.05, (256, 512, 1024)),
    ("python", 8192, GPT2, 20_000_000, 0.15, (1024,)),
    ("python", 8192, DEEPER, 20_000_000, 0.15, (1024,)),
    ("python", 8192, WIDER, 25_000_000, 0.1, (1024,)),
    ("python", 8192, WIDER, 16_000_000, 0.1, (1024,)),
    ("books", 8192, DEEPER, 22_000_000, 0.15, (512,)),
    ("books", 4096, WIDER, 34_000_000, 0.2, (512,)),
    ("books", 8192, WIDER, 19_000_000, 0.1, (512,)),
    ("shakespeare", 256, Shape(6, 256), 27_000_000, 0.25, (1024,)),
    ("shakespeare", 256, LARGE, 28_000_000, 0.2, (1024,)),
    ("shakespeare", 256, Shape(6, 384), 12_000_000, 0.2, (1024,)),
    ("shakespeare", 1024, Shape(6, 384), 4_000_000, 0.25, (512,)),
    ("shakespeare", 1024, LARGE, 8_000_000, 0.2, (512,)),
)
BYTES_PER_TOKEN = {256: 1.0, 1024: 2.6, 2048: 3.1, 4096: 3.5, 8192: 3.9}  # about


@dataclass(frozen=True)
class Cell:
    """One run of the grid; the factors multiply what a budget would choose."""

    corpus: str
    vocab_size: int
    """256: bytes."""
    num_layers: int
    embd_size: int
    tokens: int
    dropout: float = 0.0
    matrix_rate: float = 1.0
    embedding_rate: float = 1.0
    batch: float = 1.0
    optimizer: str = "muon"
    weight_decay: float = 1.0
    context_length: int = 0
    """0: what a budget would choose."""

    @property
    def name(self) -> str:
        size = f"{self.corpus}-{self.vocab_size}-{self.num_layers}x{self.embd_size}-{self.tokens // 1000}k"
        rates = f"b{self.batch:g}-m{self.matrix_rate:g}-e{self.embedding_rate:g}-{self.optimizer}"
        decay = "" if self.weight_decay == 1.0 else f"-w{self.weight_decay:g}"
        context = f"-c{self.context_length}" if self.context_length else ""
        return f"{size}-d{self.dropout:g}-{rates}{decay}{context}"

    @property
    def shape(self) -> Shape:
        return Shape(self.num_layers, self.embd_size)

    @property
    def flops(self) -> float:
        return self.tokens * count_token_flops(self.shape, self.vocab_size)

    @property
    def is_usual(self) -> bool:
        """Whether it has the rates and batch of a budget; the law is fitted on these, the others are sweeps."""
        factors = (self.matrix_rate, self.embedding_rate, self.batch, self.weight_decay)
        return set(factors) == {1.0} and self.optimizer == "muon"


def make_cells() -> list[Cell]:
    """The grid, the most useful runs first: models of several sizes that take the same compute, at rising compute."""
    frontiers = [
        make_cell(corpus, vocab_size, shape, flops)
        for flops, shapes in FRONTIERS.items()
        for vocab_size, shape, corpus in product((1024, 4096), shapes, CORPORA)
    ]
    short = [
        make_cell(corpus, vocab_size, shape, flops)
        for flops, shapes, vocab_sizes in SHORT
        for vocab_size, shape, corpus in product(vocab_sizes, shapes, CORPORA)
        if vocab_size * MIN_BYTES_PER_ENTRY <= TRAIN_BYTES[corpus]
    ]
    vocabularies = [
        make_cell(corpus, vocab_size, shape, flops)
        for flops, shape in ((4e12, SMALL), (1.6e13, MEDIUM), (6.4e13, LARGE))
        for vocab_size, corpus in product((256, 8192), CORPORA)
    ]
    repeated = [
        make_repeated_cell(corpus, 4096, shape, epochs, dropout)
        for corpus, rows in REPEATED.items()
        for shape, epochs, dropouts in rows
        for dropout in dropouts
    ]
    repeated += [
        make_repeated_cell("shakespeare", 1024, shape, epochs, dropout)
        for shape, epochs, dropout in (
            (LARGE, 8, 0.1), (LARGE, 16, 0.2), (LARGE, 32, 0.3), (LARGER, 8, 0.2), (LARGER, 16, 0.3), (WIDE, 16, 0.4),
        )
    ]  # fmt: skip
    repeated += [
        make_repeated_cell("books", 8192, shape, epochs, dropout)
        for shape, epochs, dropout in ((LARGER, 16, 0.1), (WIDE, 8, 0.2), (WIDER, 8, 0.2))
    ]
    usual = [
        make_cell(corpus, 4096, shape, flops)
        for shape, flops in ((TINY, 4e12), (SMALL, 1.6e13), (MEDIUM, 6.4e13))
        for corpus in ("books", "python")
    ]
    changes = [("matrix_rate", 0.5), ("matrix_rate", 0.7), ("embedding_rate", 0.7), ("batch", 2.0)]
    sweeps = [replace(cell, **{name: factor}) for cell, (name, factor) in product(usual, changes)]
    sweeps += [
        Cell(corpus, vocab_size, TINY.num_layers, TINY.embd_size, tokens, batch=factor)
        for tokens, (corpus, vocab_size), factor in product(FEW_TOKENS, FEW_TOKENS_OF, (1.0, 0.5, 2.0))
    ]
    adamw = [replace(cell, optimizer="adamw") for cell in usual]
    decayed = [
        replace(make_repeated_cell("shakespeare", 4096, shape, epochs, dropout), weight_decay=factor)
        for shape, epochs, dropout in ((MEDIUM, 32, 0.1), (LARGE, 16, 0.2), (LARGER, 16, 0.3))
        for factor in (3.0, 10.0)
    ]
    long = [
        Cell(corpus, vocab_size, shape.num_layers, shape.embd_size, tokens, dropout, context_length=context)
        for corpus, vocab_size, shape, tokens, dropout, contexts in LONG
        for context in contexts
    ]
    long += [
        Cell(corpus, 8192, WIDER.num_layers, WIDER.embd_size, tokens, 0.2, batch=2.0, context_length=context)
        for corpus, tokens, context in (("books", 29_000_000, 512), ("python", 25_000_000, 1024))
    ]
    cells = sorted(dict.fromkeys([*frontiers, *vocabularies]), key=lambda cell: cell.flops > 2e13)
    return list(dict.fromkeys([*cells, *short, *sweeps, *adamw, *repeated, *decayed, *long]))


def make_cell(corpus: str, vocab_size: int, shape: Shape, flops: float) -> Cell:
    """The run of a shape that takes so many FLOPs, with the dropout that a budget would choose."""
    tokens = flops / count_token_flops(shape, vocab_size)
    weights = count_weights(shape, vocab_size)
    dropout = choose_dropout(weights, tokens, TRAIN_BYTES[corpus], BYTES_PER_TOKEN[vocab_size])
    rounded = int(float(f"{tokens:.2g}"))
    return Cell(corpus, vocab_size, shape.num_layers, shape.embd_size, rounded, dropout)


def make_repeated_cell(corpus: str, vocab_size: int, shape: Shape, epochs: int, dropout: float) -> Cell:
    """The run that reads a corpus so many times."""
    tokens = int(float(f"{epochs * TRAIN_BYTES[corpus] / BYTES_PER_TOKEN[vocab_size]:.2g}"))
    return Cell(corpus, vocab_size, shape.num_layers, shape.embd_size, tokens, dropout)


def count_token_flops(shape: Shape, vocab_size: int) -> float:
    return 6.0 * count_weights(shape, vocab_size)


def find_level(flops: float) -> float:
    return min(FRONTIERS, key=lambda level: abs(math.log(level / flops)))
