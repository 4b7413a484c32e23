"""Encoded requests are those of the plain rule: encode the whole text, and split it where the context alone ends."""

from __future__ import annotations

import random

import pytest

from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.openai import ENCODINGS
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe
from gptmill.evals.prompts import Request
from gptmill.evals.request_encoding import TEXTS_PER_CALL, encode_requests

PIECES = [
    "we",
    "'ll",
    " go",
    ".",
    " 12",
    "345",
    "\n",
    " ",
    "  ",
    "\t",
    "é",
    "日本",
    "!?",
    " $",
    "'S",
    "\xa0",
    "\x1c",
    "\u2028",
    "🙂",
    "/",
]
CONTEXT = 24


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return build_tokenizer("gpt2", ())


def make_requests(count: int) -> list[Request]:
    """All kinds of seams; four choices share a context."""
    generator = random.Random(0)

    def write(most: int) -> str:
        return "".join(generator.choices(PIECES, k=generator.randrange(1, most)))

    contexts = [write(12) if number % 9 else "" for number in range(count // 4)]
    return [Request(context, generator.choice(["", " "]) + "x" + write(8)) for context in contexts for _ in range(4)]


def encode_plainly(tokenizer: Tokenizer, request: Request) -> tuple[list[int], int]:
    context = tokenizer.encode(request.context.rstrip()).tolist()
    whole = tokenizer.encode(request.context + request.continuation).tolist()
    count = len(whole) - len(context)
    whole = whole if context else [tokenizer.end_of_text, *whole]
    return whole[-(CONTEXT + 1) :], min(count, CONTEXT)


def check(tokenizer: Tokenizer, requests: list[Request]) -> None:
    expected = [encode_plainly(tokenizer, request) for request in requests]
    found = encode_requests(
        tokenizer, [r for r, (_, count) in zip(requests, expected, strict=True) if count > 0], CONTEXT
    )
    pairs = [(ids.tolist(), count) for ids, count in zip(found.ids, found.scored.tolist(), strict=True)]
    assert pairs == [pair for pair in expected if pair[1] > 0]


def test_parts_are_encoded_as_the_whole_text(gpt2: Tokenizer) -> None:
    check(gpt2, make_requests(TEXTS_PER_CALL + 4))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_pattern_splits_at_the_seam(encoding: str, gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = gpt2.bpe.ranks  # type: ignore[attr-defined]
    bpe = TiktokenBpe(ENCODINGS[encoding].pattern, ranks, {"<|endoftext|>": gpt2.end_of_text})
    monkeypatch.setattr(gpt2, "bpe", bpe)
    monkeypatch.setattr(gpt2, "encode", bpe.encode)
    check(gpt2, make_requests(400))


def test_other_tokenizers_follow_the_same_rule() -> None:
    check(build_tokenizer("byte", ()), make_requests(400))
