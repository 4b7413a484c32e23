"""Learns a byte-level BPE from text and writes it as a standard tokenizer.json. Knows no sources.

Text is split as for GPT-4, not as for GPT-2: numbers fall into groups of at most three digits, so that no merges are
spent on years and prices; a line break never joins the word after it; contractions in capitals are known too. The
pattern is spelt as Llama 3's file spells it, because the possessive one of tiktoken means other things to Hugging Face.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.byte_level import spell
from gptmill.data.tokenizers.byte_pairs import BytePairs, cut_white_space
from gptmill.data.tokenizers.gpt2_bpe import END_OF_TEXT, Gpt2Tokenizer

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MIN_VOCAB_SIZE = 257  # every byte, and the end of text
STRETCH_CHARS = 16_384
LINE_START = re.compile(r"(?<=\n)(?=\S)")  # the pattern always splits here, so that cutting changes no word
STRETCHES_AT_ONCE = 2048
HELD_OUT_EVERY = 20
SAMPLE_BYTES = 4_000_000
LONGEST_SHOWN = 8

Report = Callable[[int], None]


@dataclass(frozen=True)
class Compression:
    """How a text shrinks: more bytes per token is better."""

    text_bytes: int
    bytes_per_token: float
    gpt2_bytes_per_token: float


@dataclass(frozen=True)
class Training:
    """A learnt tokenizer and what is known of it."""

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
    """A tokenizer of exactly `vocab_size` ids, learnt from the first `max_bytes` of `texts`; the same every time.

    Every twentieth stretch of about 16,000 characters is kept out of it, and measured beside the others.
    """
    try:
        import rustbpe
    except ImportError:
        raise UserError("training a tokenizer needs the library rustbpe; run: pip install 'gptmill[data]'") from None
    started = time.monotonic()
    stretches = _Stretches(texts, max_bytes, report)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(
        iter(stretches), vocab_size=vocab_size - 1, buffer_size=STRETCHES_AT_ONCE, pattern=PATTERN
    )
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if stretches.text_bytes == 0:
        raise UserError("the corpus holds no text; give files that contain some")
    if len(ranks) < vocab_size - 1:
        raise UserError(
            f"{stretches.text_bytes:,} bytes of text are too few for --vocab_size {vocab_size}: they hold "
            f"{len(ranks) - 256:,} merges; give more text or a --vocab_size of at most {len(ranks) + 1}"
        )
    pairs = BytePairs(PATTERN, ranks, {END_OF_TEXT: len(ranks)})
    gpt2 = Gpt2Tokenizer()
    used = {id_ for text in stretches.sample + stretches.held_out for id_ in np.unique(pairs.encode(text)).tolist()}
    return Training(
        definition=make_definition(ranks),
        vocab_size=pairs.vocab_size,
        text_bytes=stretches.text_bytes,
        is_whole=stretches.is_whole,
        on_training=_measure(stretches.sample, pairs, gpt2),
        on_held_out=_measure(stretches.held_out, pairs, gpt2) if stretches.held_out else None,
        used_share=len(used) / len(ranks),
        longest=tuple(sorted(ranks, key=lambda token: (-len(token), token))[:LONGEST_SHOWN]),
        seconds=time.monotonic() - started,
    )


def make_definition(ranks: dict[bytes, int]) -> str:
    """The tokenizer.json of a table of ranks, with the end of text after them."""
    by_rank = sorted(ranks, key=ranks.__getitem__)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(ranks), "content": END_OF_TEXT, **flags}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): ranks[token] for token in by_rank},
            "merges": [" ".join(map(spell, _split_token(token, ranks))) for token in by_rank if len(token) > 1],
        },
    }
    return json.dumps(definition, ensure_ascii=False, indent=1) + "\n"


class _Stretches:
    """The training part of `texts`, in stretches, and what was seen on the way."""

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
        for number, stretch in enumerate(_cut(self._texts)):
            size = len(stretch.encode())
            if self.text_bytes + size > self._max_bytes:
                self.is_whole = False
                return
            self.text_bytes += size
            self._report(self.text_bytes)
            is_held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            name, kept = ("held_out", self.held_out) if is_held_out else ("sample", self.sample)
            # The sample is as thin as what is held out, so that both come from the same places.
            if (is_held_out or number % HELD_OUT_EVERY == 0) and kept_bytes[name] < SAMPLE_BYTES:
                kept.append(stretch)
                kept_bytes[name] += size
            if not is_held_out:
                yield stretch


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for piece in cut_white_space(text):
            start = 0
            while start < len(piece):
                line = LINE_START.search(piece, start + STRETCH_CHARS)
                end = line.start() if line else len(piece)
                yield piece[start:end]
                start = end


def _split_token(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that were merged into `token`: what the merges before it make of its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(one + next_, len(ranks)) for one, next_ in pairwise(parts)]
        place = joined.index(min(joined))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _measure(texts: list[str], pairs: BytePairs, gpt2: Gpt2Tokenizer) -> Compression:
    text_bytes = sum(len(text.encode()) for text in texts)
    tokens = sum(pairs.encode(text).size for text in texts)
    gpt2_tokens = sum(gpt2.encode(text).size for text in texts)
    return Compression(text_bytes, text_bytes / tokens, text_bytes / gpt2_tokens)
