"""A sample of a corpus: how much text there is, how hard it is to predict, and how tokenizers fare on it."""

from __future__ import annotations

import lzma
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Source, resolve_source
from gptmill.data.sources.compression import split_compression
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.bpe_training import build_bpe, learn_ranks, make_definition
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe
from gptmill.experiments.budget.candidate import CorpusFacts, TokenizerOption, choose_val_fraction
from gptmill.experiments.budget.excerpt import read_excerpt

SAMPLE_BYTES = 1_000_000
MIN_CORPUS_BYTES = 2_000
COMPRESSION_RATIO = 3  # text over its compressed form, where that has not been read to its end
VOCAB_SIZES = (512, 1024, 2048, 4096, 8192)
# Of text for each entry of a vocabulary: rarer ones are not learned. On 1 MB of Shakespeare, 8,192 entries were 1.5 %
# worse than 4,096.
MIN_BYTES_PER_ENTRY = 150
TIMED_CHARS = 200_000
# Held-out text is little, and may be harder or easier than the corpus. Of Python's library, whose pieces differ much,
# one validation text was 18 % harder than another for five models; its density was 11 % higher.
PIECE_BYTES, MOST_PIECES = 6_000, 64
LOSS_BY_DENSITY = 2.0  # a loss grows with about the square of the density, by the exponents in law.json


@dataclass(frozen=True)
class Sample:
    """Pieces of a corpus."""

    text: str
    facts: CorpusFacts
    is_whole: bool
    spread: float
    """Of the loss on a validation split, as its text happens to be: a standard deviation, relative to the loss."""


@dataclass(frozen=True)
class MeasuredTokenizer:
    """A tokenizer with its figures, and what makes its tokenizer.json if it was trained on the sample."""

    option: TokenizerOption
    make_definition: Callable[[], str] | None = None


def read_sample(corpus: str) -> Sample:
    """Reads some of the corpus; raises UserError if there is none, or too little."""
    source = resolve_source([corpus], ReadingOptions())
    text, is_whole = read_excerpt(source, SAMPLE_BYTES)
    size = len(text.encode())
    if size < MIN_CORPUS_BYTES:
        raise UserError(
            f"--corpus {corpus} has {size:,} bytes of text; a budget needs at least {MIN_CORPUS_BYTES:,} to choose a "
            f"model, and some megabytes to be of use"
        )
    total = size if is_whole else max(size, _estimate_bytes(source))
    return Sample(text, CorpusFacts(total, measure_density(text)), is_whole, measure_spread(text, total))


def measure_spread(text: str, total_bytes: int) -> float:
    """How far the loss on the split that a corpus gets may be from that on all of it, by the densities of pieces."""
    data = text.encode()
    distance = max(PIECE_BYTES, len(data) // MOST_PIECES)
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data) - PIECE_BYTES, distance)]
    if len(pieces) < 2:
        return 0.0
    densities = [len(zlib.compress(piece, 9)) for piece in pieces]
    held_out = max(1.0, choose_val_fraction(total_bytes) * total_bytes / PIECE_BYTES)
    return LOSS_BY_DENSITY * statistics.stdev(densities) / statistics.fmean(densities) / math.sqrt(held_out)


def measure_density(text: str) -> float:
    """The bits that LZMA leaves of a byte: it finds what a model learns first, and long repetitions as well."""
    data = text.encode()[:SAMPLE_BYTES]
    return 8 * len(lzma.compress(data)) / max(1, len(data))


def measure_tokenizers(sample: Sample, given: str | None) -> Iterator[MeasuredTokenizer]:
    """The given tokenizer alone; or bytes, and BPE trained on the sample in all sizes that the text is enough for.

    One training gives them all: the merges of a smaller vocabulary are the first ones of a larger.
    """
    if given is not None:
        yield measure_tokenizer(given, build_tokenizer(given, [sample.text]), sample.text)
        return
    yield measure_tokenizer("byte", build_tokenizer("byte", []), sample.text)
    size = len(sample.text.encode())
    sizes = [vocab_size for vocab_size in VOCAB_SIZES if vocab_size * MIN_BYTES_PER_ENTRY <= sample.facts.text_bytes]
    if not sizes:
        return
    try:
        ranks, segments = learn_ranks([sample.text], sizes[-1], size, lambda _: None)
    except UserError:  # no library to train with
        return
    for vocab_size in sizes:
        if len(ranks) < vocab_size - 1:  # too few distinct words for so many merges
            return
        own = {token: rank for token, rank in ranks.items() if rank < vocab_size - 1}
        option = _measure_bpe(f"bpe-{vocab_size}", build_bpe(own), segments.held_out or segments.sample)
        yield MeasuredTokenizer(option, partial(make_definition, own))


def _measure_bpe(name: str, bpe: TiktokenBpe, texts: Sequence[str]) -> TokenizerOption:
    started = time.monotonic()
    tokens = sum(len(bpe.encode(text)) for text in texts)
    seconds = max(time.monotonic() - started, 1e-4)
    size = sum(len(text.encode()) for text in texts)
    return TokenizerOption(name, bpe.vocab_size, size / max(1, tokens), size / seconds)


def measure_tokenizer(name: str, tokenizer: Tokenizer, text: str) -> MeasuredTokenizer:
    """Encodes some of the text."""
    text = text[:TIMED_CHARS]
    started = time.monotonic()
    tokens = len(tokenizer.encode(text))
    seconds = max(time.monotonic() - started, 1e-4)
    size = len(text.encode())
    return MeasuredTokenizer(TokenizerOption(name, tokenizer.vocab_size, size / max(1, tokens), size / seconds))


def _estimate_bytes(source: Source) -> int:
    is_compressed = any(split_compression(Path(file.path_name).name)[1] for file in source.files)
    return source.size_bytes * (COMPRESSION_RATIO if is_compressed else 1)
