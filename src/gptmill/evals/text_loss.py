"""Loss, perplexity and bits per byte of tokens of any number: a split of a corpus, or a text.

Windows move over the tokens by a stride, and each counts only the tokens that are new to it. So every token but the
first is counted once, and beyond the first window it is predicted from at least context_length - stride tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import TokenArray
from gptmill.evals.likelihood import LikelihoodScorer
from gptmill.evals.metrics import Measured
from gptmill.evals.request_encoding import Sequences

# Windows that are scored at a time: their tokens' results are in memory together.
PIECE_TOKENS = 2**22
DECODED_TOKENS = 2**16

Report = Callable[[int, int], None]
"""Called with (tokens done, total tokens)."""


@dataclass(frozen=True)
class TextScores:
    """How well a model predicts a text."""

    name: str
    num_tokens: int
    num_bytes: int
    """Of the text in UTF-8; end_of_text has none."""
    metrics: dict[str, Measured]
    """loss in nats per token, perplexity, and bits_per_byte, which does not depend on the tokenizer."""
    seconds: float


@dataclass(frozen=True)
class Window:
    """Tokens start … end - 1, which predict start + 1 … end; the last `new` of those count."""

    start: int
    end: int
    new: int


def list_windows(num_tokens: int, context_length: int, stride: int) -> Iterator[Window]:
    """The windows over a stream of tokens; the last one moves less where less is left."""
    done = 0
    while done < num_tokens - 1:
        end = min(num_tokens - 1, done + (stride if done else context_length))
        yield Window(max(0, end - context_length), end, end - done)
        done = end


def measure_text(
    name: str,
    streams: Sequence[TokenArray],
    tokenizer: Tokenizer,
    scorer: LikelihoodScorer,
    context_length: int,
    stride: int,
    report: Report = lambda _done, _total: None,
) -> TextScores:
    """Raises UserError if there is nothing to predict. All ranks call it with the same streams."""
    started, total = time.monotonic(), sum(max(0, len(stream) - 1) for stream in streams)
    if not total:
        raise UserError(f"{name} has no tokens to predict; give some text")
    sums: list[NDArray[np.float64]] = []
    counts: list[NDArray[np.int64]] = []
    done = 0
    for sequences in _cut(streams, context_length, stride):
        found = scorer.score_sequences(sequences, _make_report(report, done, sequences, total))
        sums.append(found.logprobs)
        counts.append(found.tokens)
        done += int(found.tokens.sum())
    num_bytes = sum(count_bytes(tokenizer, stream[1:]) for stream in streams)
    metrics = _summarise(-np.concatenate(sums), np.concatenate(counts), num_bytes)
    return TextScores(name, total, num_bytes, metrics, time.monotonic() - started)


def _make_report(report: Report, done: int, sequences: Sequences, total: int) -> Report:
    """Windows of this piece, turned into tokens of all."""
    tokens = int(sequences.scored.sum())
    return lambda seen, windows: report(done + tokens * seen // windows, total)


def count_bytes(tokenizer: Tokenizer, tokens: TokenArray) -> int:
    """The bytes of the tokens' text in UTF-8."""
    parts = (tokens[first : first + DECODED_TOKENS] for first in range(0, len(tokens), DECODED_TOKENS))
    return sum(len(tokenizer.decode_bytes(part.tolist())) for part in parts)


def _cut(streams: Sequence[TokenArray], context_length: int, stride: int) -> Iterator[Sequences]:
    """The windows of all streams, a piece at a time."""
    windows = (
        (stream[window.start : window.end + 1], window.new)
        for stream in streams
        for window in list_windows(len(stream), context_length, stride)
    )
    while piece := list(islice(windows, max(1, PIECE_TOKENS // context_length))):
        yield Sequences([ids for ids, _ in piece], np.array([new for _, new in piece], dtype=np.int64), 0)


def _summarise(nats: NDArray[np.float64], counts: NDArray[np.int64], num_bytes: int) -> dict[str, Measured]:
    """The standard errors are those of a mean over windows, each weighted by its tokens."""
    total = float(counts.sum())
    loss, stderr = float(nats.sum()) / total, None
    if len(nats) > 1:
        spread = float(((nats - loss * counts) ** 2).sum()) * len(nats) / (len(nats) - 1)
        stderr = math.sqrt(spread) / total
    perplexity = math.exp(min(loss, 700.0))  # beyond that it is no number any more
    metrics = {"loss": Measured(loss, stderr), "perplexity": Measured(perplexity, _scale(stderr, perplexity))}
    if num_bytes:
        bits = total / num_bytes / math.log(2)
        metrics["bits_per_byte"] = Measured(loss * bits, _scale(stderr, bits))
    return metrics


def _scale(stderr: float | None, factor: float) -> float | None:
    return None if stderr is None else stderr * factor
