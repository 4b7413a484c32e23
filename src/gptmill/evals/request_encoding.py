"""Requests as tokens, by the rules of lm-evaluation-harness; every distinct text is encoded once, many in one go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.gpt2_bpe import WORD_PATTERN
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe
from gptmill.evals.prompts import Request

SEPARATOR = "\n"
TEXTS_PER_CALL = 2048

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Sequences:
    """Encoded requests: the ids of context and continuation, and how many of them are the continuation's."""

    ids: Sequence[Ids]
    scored: NDArray[np.int64]
    num_cropped: int


def encode_requests(tokenizer: Tokenizer, requests: Iterable[Request], context_length: int) -> Sequences:
    """Encodes requests; those longer than the context lose their beginning."""
    pairs = encode_pairs(tokenizer, list(requests))
    num_cropped = sum(len(ids) > context_length + 1 for ids, _ in pairs)
    counts = np.array([count for _, count in pairs], dtype=np.int64)
    return Sequences([ids[-(context_length + 1) :] for ids, _ in pairs], counts.clip(max=context_length), num_cropped)


def encode_pairs(tokenizer: Tokenizer, requests: Sequence[Request]) -> list[tuple[Ids, int]]:
    """The ids of context and continuation, and how many of them are the continuation's.

    Both are encoded as one text, which is then split where the context alone would end. White space at the end of the
    context counts as the continuation's, since most tokenizers attach it to the next word. A context without tokens
    becomes end_of_text, as at the beginning of a document.
    """
    splits_at_spaces = isinstance(getattr(tokenizer, "bpe", None), TiktokenBpe)
    seams = [splits_at_spaces and _has_seam(request) for request in requests]
    # Behind a seam, the continuation can be encoded by itself.
    seconds = [
        request.continuation if has_seam else request.context + request.continuation
        for request, has_seam in zip(requests, seams, strict=True)
    ]
    firsts = [request.context.rstrip() for request in requests]
    ids = encode_texts(tokenizer, dict.fromkeys(firsts + seconds))
    start = np.array([tokenizer.end_of_text], dtype=np.int64)
    pairs = []
    for request, has_seam, first, second in zip(requests, seams, firsts, seconds, strict=True):
        context, rest = ids[first], ids[second]
        count = len(rest) if has_seam else len(rest) - len(context)
        if count < 1:
            raise UserError(
                f"the continuation {request.continuation!r} has no token of its own after {request.context[-20:]!r}; "
                "begin it with a space (the task's delimiter), and give it some text"
            )
        is_whole = len(context) and not has_seam
        pairs.append((rest if is_whole else np.concatenate([context if has_seam else start, rest]), count))
    return pairs


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Ids]:
    """The ids of each text. Short texts cost more in calls than in encoding, so that GPT-2's are joined."""
    bpe, texts = getattr(tokenizer, "bpe", None), list(texts)
    if not isinstance(bpe, TiktokenBpe) or bpe.pattern != WORD_PATTERN:
        return {text: tokenizer.encode(text) for text in texts}
    joined = [text for text in texts if _can_join(text)]
    groups = [joined[first : first + TEXTS_PER_CALL] for first in range(0, len(joined), TEXTS_PER_CALL)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # tiktoken releases Python's lock
        encoded = list(threads.map(bpe.encode, map(SEPARATOR.join, groups)))
    found: dict[str, Ids] = {}
    (separator,) = bpe.encode(SEPARATOR)
    for group, ids in zip(groups, encoded, strict=True):
        ends = [*np.flatnonzero(ids == separator).tolist(), len(ids)]
        starts = [0, *(end + 1 for end in ends[:-1])]
        found |= {text: ids[start:end] for text, start, end in zip(group, starts, ends, strict=True)}
    return found | {text: bpe.encode(text) for text in texts if text not in found}


def _has_seam(request: Request) -> bool:
    """Whether a word ends with the context, and one begins with the continuation's first space.

    The pre-tokenizer patterns of GPT-2 and of OpenAI's later encodings always split there: a space begins a piece, or
    stands among white space alone. Byte-pair encoding joins nothing across pieces.
    """
    return bool(request.context) and not request.context[-1].isspace() and _begins_word(request.continuation)


def _can_join(text: str) -> bool:
    """Whether a line break before and after the text is a token by itself, and changes none of the text's."""
    is_line = bool(text) and SEPARATOR not in text and not text[-1].isspace()
    return is_line and (not text[0].isspace() or _begins_word(text))


def _begins_word(text: str) -> bool:
    return len(text) > 1 and text[0] == " " and not text[1].isspace()
