"""Requests as tokens, by the rules of lm-evaluation-harness; in threads, since tokenizers release Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe
from gptmill.evals.prompts import Request

CHUNK = 512  # requests that a thread encodes in one go
MAX_THREADS = 8  # more would wait for Python's lock

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Sequences:
    """Encoded requests: the ids of context and continuation, and how many of them are the continuation's."""

    ids: Sequence[Ids]
    scored: NDArray[np.int64]
    num_cropped: int


def encode_requests(tokenizer: Tokenizer, requests: Iterable[Request], context_length: int) -> Sequences:
    """Encodes requests; those longer than the context lose their beginning."""
    requests = list(requests)
    chunks = [requests[first : first + CHUNK] for first in range(0, len(requests), CHUNK)]
    encoder = RequestEncoder(tokenizer)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        pairs = [pair for chunk in threads.map(encoder.encode_chunk, chunks) for pair in chunk]
    num_cropped = sum(len(ids) > context_length + 1 for ids, _ in pairs)
    counts = np.array([count for _, count in pairs], dtype=np.int64)
    return Sequences([ids[-(context_length + 1) :] for ids, _ in pairs], counts.clip(max=context_length), num_cropped)


class RequestEncoder:
    """A tokenizer for requests; any number of threads may use it at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        bpe = getattr(tokenizer, "bpe", None)
        self._splits_at_spaces = isinstance(bpe, TiktokenBpe)
        # The same ids as the tokenizer's, but without its backend for corpora, which is no thread's but the first's.
        self._encode: Callable[[str], Ids] = bpe.encode if isinstance(bpe, TiktokenBpe) else tokenizer.encode
        self._end_of_text = np.array([tokenizer.end_of_text], dtype=np.int64)

    def encode_chunk(self, requests: Sequence[Request]) -> list[tuple[Ids, int]]:
        """Encodes requests of which neighbours may share their context."""
        pairs, context, ids = [], "", np.zeros(0, dtype=np.int64)
        for request in requests:
            stripped = request.context.rstrip()
            if stripped != context:
                context, ids = stripped, self._encode(stripped).astype(np.int64)
            pairs.append(self._encode_pair(request, ids))
        return pairs

    def _encode_pair(self, request: Request, context_ids: Ids) -> tuple[Ids, int]:
        """The ids of context and continuation, and how many of them are the continuation's.

        Both are encoded as one text, which is then split where the context alone would end. White space at the end of
        the context counts as the continuation's, since most tokenizers attach it to the next word. A context without
        tokens becomes end_of_text, as at the beginning of a document.
        """
        context, continuation = request.context, request.continuation
        if context and self._splits_at_spaces and _has_seam(context, continuation):
            continuation_ids = self._encode(continuation).astype(np.int64)
            return np.concatenate([context_ids, continuation_ids]), len(continuation_ids)
        whole = self._encode(context + continuation).astype(np.int64)
        count = len(whole) - len(context_ids)
        if count < 1:
            raise UserError(
                f"the continuation {continuation!r} has no token of its own after {context[-20:]!r}; "
                "begin it with a space (the task's delimiter), and give it some text"
            )
        return (whole if len(context_ids) else np.concatenate([self._end_of_text, whole])), count


def _has_seam(context: str, continuation: str) -> bool:
    """Whether a word ends with the context, and one begins with the continuation's only space.

    The pre-tokenizer patterns of GPT-2 and of OpenAI's later encodings always split there: a space begins a piece, or
    stands among white space alone. Byte-pair encoding joins nothing across pieces, so that each part can be encoded by
    itself.
    """
    return (
        not context[-1].isspace()
        and continuation[:1] == " "
        and not continuation[1:2].isspace()
        and len(continuation) > 1
    )


def encode_pair(tokenizer: Tokenizer, request: Request) -> tuple[Ids, int]:
    """The ids of a single request, and how many of them are the continuation's."""
    ((ids, count),) = RequestEncoder(tokenizer).encode_chunk([request])
    return ids, count
