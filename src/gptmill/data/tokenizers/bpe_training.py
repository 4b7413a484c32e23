"""Trains a byte-level BPE tokenizer and writes it as a standard tokenizer.json. Knows no sources.

The pre-tokenizer is GPT-4's, not GPT-2's: it groups at most three digits, so that no merges are spent on years and
prices; it separates a line break from the word after it; it splits contractions in capitals too. The pattern is
written as in Llama 3's file, because Hugging Face's regex engine reads tiktoken's possessive quantifiers differently.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.bpe_definition import BYTE_LEVEL, make_bpe_definition, make_split
from gptmill.data.tokenizers.gpt2_bpe import END_OF_TEXT, Gpt2Tokenizer
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe, split_long_whitespace

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MIN_VOCAB_SIZE = 257  # every byte, and the end-of-text token
SEGMENT_CHARS = 16_384
LINE_START = re.compile(r"(?<=\n)(?=\S)")  # the pre-tokenizer always splits here, so that cutting changes no word
SEGMENTS_PER_BATCH = 2048
HELD_OUT_EVERY = 20
SAMPLE_BYTES = 4_000_000
LONGEST_SHOWN = 8

Report = Callable[[int], None]


@dataclass(frozen=True)
class Compression:
    """Compression ratio on a text; more bytes per token are better."""

    text_bytes: int
    bytes_per_token: float
    gpt2_bytes_per_token: float


@dataclass(frozen=True)
class Training:
    """A trained tokenizer and its statistics."""

    definition: str
    vocab_size: int
    text_bytes: int
    is_whole: bool
    on_training: Compression
    on_held_out: Compression | None
    used_share: float
    longest: tuple[bytes, ...]
    seconds: float


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_bytes: int, report: Report) -> Training:
    """Trains a tokenizer of exactly `vocab_size` ids on the first `max_bytes` of `texts`, deterministically."""
    started = time.monotonic()
    ranks, segments = learn_ranks(texts, vocab_size, max_bytes, report)
    if segments.text_bytes == 0:
        raise UserError("the corpus contains no text; give files that contain some")
    if len(ranks) < vocab_size - 1:
        raise UserError(
            f"{segments.text_bytes:,} bytes of text are too few for --vocab_size {vocab_size}: they yield "
            f"{len(ranks) - 256:,} merges; give more text or a --vocab_size of at most {len(ranks) + 1}"
        )
    bpe, gpt2 = build_bpe(ranks), Gpt2Tokenizer()
    used = {id_ for text in segments.sample + segments.held_out for id_ in np.unique(bpe.encode(text)).tolist()}
    return Training(
        definition=make_definition(ranks),
        vocab_size=bpe.vocab_size,
        text_bytes=segments.text_bytes,
        is_whole=segments.is_whole,
        on_training=_measure(segments.sample, bpe, gpt2),
        on_held_out=_measure(segments.held_out, bpe, gpt2) if segments.held_out else None,
        used_share=len(used) / len(ranks),
        longest=tuple(sorted(ranks, key=lambda token: (-len(token), token))[:LONGEST_SHOWN]),
        seconds=time.monotonic() - started,
    )


def learn_ranks(
    texts: Iterable[str], vocab_size: int, max_bytes: int, report: Report
) -> tuple[dict[bytes, int], Segments]:
    """The rank of every token but end-of-text, in the order in which they were merged, and the text that was read.

    A smaller vocabulary is a prefix of it. There are fewer ranks than asked for where the text yields no more merges.
    """
    try:
        import rustbpe
    except ImportError:
        raise UserError("training a tokenizer needs the library rustbpe; run: pip install 'gptmill[data]'") from None
    segments = Segments(texts, max_bytes, report)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(
        iter(segments), vocab_size=vocab_size - 1, buffer_size=SEGMENTS_PER_BATCH, pattern=PATTERN
    )
    return {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}, segments


def build_bpe(ranks: dict[bytes, int]) -> TiktokenBpe:
    """The encoder of a rank table, with the end-of-text token after it."""
    return TiktokenBpe(PATTERN, ranks, {END_OF_TEXT: len(ranks)})


def make_definition(ranks: dict[bytes, int]) -> str:
    """Returns the tokenizer.json of a rank table, with the end-of-text token after it."""
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [make_split(PATTERN), BYTE_LEVEL]}
    definition = make_bpe_definition(ranks, pre_tokenizer, {END_OF_TEXT: len(ranks)})
    return json.dumps(definition, ensure_ascii=False, indent=1) + "\n"


class Segments:
    """Iterates over the training segments of `texts`; collects held-out segments, a sample and statistics.

    Every twentieth segment of about 16,000 characters is held out, to measure compression on unseen text.
    """

    def __init__(self, texts: Iterable[str], max_bytes: int, report: Report) -> None:
        self._texts = texts
        self._max_bytes = max_bytes
        self._report = report
        self.text_bytes = 0
        self.is_whole = True
        self.sample: list[str] = []
        self.held_out: list[str] = []

    def __iter__(self) -> Iterator[str]:
        kept_bytes = {"sample": 0, "held_out": 0}
        for number, segment in enumerate(_cut(self._texts)):
            size = len(segment.encode())
            if self.text_bytes + size > self._max_bytes:
                self.is_whole = False
                return
            self.text_bytes += size
            self._report(self.text_bytes)
            is_held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            name, kept = ("held_out", self.held_out) if is_held_out else ("sample", self.sample)
            # The sample is as sparse as the held-out text, so that both cover the same part of the corpus.
            if (is_held_out or number % HELD_OUT_EVERY == 0) and kept_bytes[name] < SAMPLE_BYTES:
                kept.append(segment)
                kept_bytes[name] += size
            if not is_held_out:
                yield segment


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for piece in split_long_whitespace(text):
            start = 0
            while start < len(piece):
                line = LINE_START.search(piece, start + SEGMENT_CHARS)
                end = line.start() if line else len(piece)
                yield piece[start:end]
                start = end


def _measure(texts: list[str], bpe: TiktokenBpe, gpt2: Gpt2Tokenizer) -> Compression:
    text_bytes = sum(len(text.encode()) for text in texts)
    tokens = sum(bpe.encode(text).size for text in texts)
    gpt2_tokens = sum(gpt2.encode(text).size for text in texts)
    return Compression(text_bytes, text_bytes / tokens, text_bytes / gpt2_tokens)
