"""Text from tokens: whole characters, clean cuts at stop strings, however they fall on tokens."""

from __future__ import annotations

import random

import pytest

from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.inference.text_builder import TextBuilder

TOKENIZER = ByteTokenizer()


class ChunkTokenizer:
    """Tokens that are pieces of a given text, cut anywhere, even inside characters."""

    end_of_text = -1

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._pieces[token] for token in ids)


def feed(text: str, *stops: str) -> tuple[TextBuilder, list[str]]:
    builder = TextBuilder(TOKENIZER, stops)
    pieces = [builder.add(token) for token in TOKENIZER.encode(text).tolist()]
    return builder, [piece for piece in [*pieces, builder.finish()] if piece]


def test_a_character_comes_when_its_last_byte_does() -> None:
    builder, pieces = feed("a🙂é中")
    assert pieces == ["a", "🙂", "é", "中"]
    assert (builder.text, builder.finish_reason) == ("a🙂é中", "length")


def test_half_a_character_at_the_end_is_marked() -> None:
    builder = TextBuilder(TOKENIZER)
    assert [builder.add(byte) for byte in "é🙂".encode()[:4]] == ["", "é", "", ""]
    assert builder.finish() == "�"


def test_the_end_of_the_document_ends_the_text() -> None:
    builder = TextBuilder(TOKENIZER)
    tokens = [*b"ab", TOKENIZER.end_of_text, *b"cd"]
    assert "".join(builder.add(token) for token in tokens) + builder.finish() == "ab"
    assert (builder.finish_reason, builder.tokens) == ("end_of_text", tokens[:3])


def test_a_stop_string_over_many_tokens_leaves_no_trace() -> None:
    builder, pieces = feed("one two END three", "END")
    assert "".join(pieces) == builder.text == "one two "
    assert builder.finish_reason == "stop"
    assert builder.tokens == list(b"one two END")


def test_what_only_begins_like_a_stop_string_is_given_out() -> None:
    builder, pieces = feed("E EN ENE EN", "END")
    assert "".join(pieces) == "E EN ENE EN"
    assert builder.finish_reason == "length"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert feed("a\n\nb###", "###", "\n\n")[0].text == "a"
    assert feed("###", "###")[0].text == ""


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_into_tokens_gives_the_same_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab🙂é", k=40))
    stops = ["".join(rng.choices("ab🙂é", k=rng.randint(2, 4))) for _ in range(2)]
    data, pieces = text.encode(), []
    while data:
        size = rng.randint(1, 7)
        pieces.append(data[:size])
        data = data[size:]
    builder = TextBuilder(ChunkTokenizer(pieces), stops)  # type: ignore[arg-type]
    given = "".join(builder.add(token) for token in range(len(pieces))) + builder.finish()
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    # A token may complete two stop strings at once: then the one that begins first counts.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not found:
        assert given == builder.text == text
    else:
        assert given == builder.text
        assert given in {text[:place] for place in found}
        assert len(ends) > 1 or given == text[: found[0]]
