"""Tokenizers: text comes back as it went in, ids are the published ones, and a spec makes the same tokenizer again."""

from __future__ import annotations

import base64
import json
import lzma
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import TOKENIZERS, Tokenizer, build_tokenizer, restore_tokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.protocol import choose_dtype, decode, make_fingerprint

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = sorted(TOKENIZERS)
ORIGINAL_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@cache
def make_tokenizer(name: str) -> Tokenizer:
    return build_tokenizer(name, ["Hello, I am a language model <|endoftext|>\n", "éß漢🙂"])


@pytest.mark.parametrize("name", ["byte", "gpt2"])
@given(text=TEXTS)
@example("")
@example("\r\n\t  \u2028\x00\ufeffnaïve 漢字 🙂👩‍👩‍👧 <|endoftext|>")
@settings(deadline=None)
def test_any_text_comes_back_whole(name: str, text: str) -> None:
    tokenizer = make_tokenizer(name)
    ids = tokenizer.encode(text)
    assert decode(tokenizer, ids.tolist()) == text
    assert ids.max(initial=0) < tokenizer.vocab_size


@given(texts=st.lists(TEXTS, max_size=4))
@settings(deadline=None)
def test_char_brings_back_every_text_that_it_learnt_from(texts: list[str]) -> None:
    tokenizer = CharTokenizer.train(texts)
    assert tokenizer.vocab_size == len(set("".join(texts))) + 1
    for text in texts:
        ids = tokenizer.encode(text)
        assert decode(tokenizer, ids.tolist()) == text
        assert ids.max(initial=0) < tokenizer.vocab_size


@given(learnt=TEXTS, text=TEXTS)
@example(learnt="", text="a")
@settings(deadline=None)
def test_char_names_the_characters_that_it_does_not_know(learnt: str, text: str) -> None:
    tokenizer = CharTokenizer.train([learnt])
    if set(text) <= set(learnt):
        assert decode(tokenizer, tokenizer.encode(text).tolist()) == text
    else:
        strange = "".join(sorted(set(text) - set(learnt)))
        with pytest.raises(UserError) as caught:
            tokenizer.encode(text)
        assert repr(strange) in str(caught.value)


def test_char_ids_follow_code_points_whatever_the_order_of_texts() -> None:
    tokenizer = CharTokenizer.train(["ba", "🙂c"])
    assert tokenizer.encode("abc🙂").tolist() == [0, 1, 2, 3]
    assert tokenizer.spec() == CharTokenizer.train(["c🙂", "ab"]).spec()


def test_gpt2_ids_are_the_published_ones() -> None:
    tokenizer = make_tokenizer("gpt2")
    ids = tokenizer.encode("Hello, I am a language model")
    assert ids.tolist() == [15496, 11, 314, 716, 257, 3303, 2746]
    assert ids.dtype == np.uint16
    assert tokenizer.vocab_size == 50257
    assert tokenizer.end_of_text == 50256


def test_gpt2_encodes_a_very_long_run_of_white_space() -> None:
    tokenizer, text = make_tokenizer("gpt2"), " " * 1_000_000 + "end"
    assert decode(tokenizer, tokenizer.encode(text).tolist()) == text


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_text_mark_inside_a_text_is_plain_text(name: str) -> None:
    tokenizer, text = make_tokenizer(name), "a <|endoftext|> model"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.end_of_text not in ids
    assert decode(tokenizer, ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_end_of_text_has_no_bytes(name: str) -> None:
    tokenizer = make_tokenizer(name)
    ids = tokenizer.encode("language").tolist()
    assert decode(tokenizer, [tokenizer.end_of_text, *ids, tokenizer.end_of_text]) == "language"


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_that_went_through_json_makes_the_same_tokenizer(name: str) -> None:
    tokenizer = make_tokenizer(name)
    restored = restore_tokenizer(json.loads(json.dumps(tokenizer.spec())), "here")
    assert make_fingerprint(restored) == make_fingerprint(tokenizer)
    assert restored.encode("model").tolist() == tokenizer.encode("model").tolist()
    assert (restored.vocab_size, restored.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)


def test_fingerprints_tell_tokenizers_and_alphabets_apart() -> None:
    tokenizers = [*map(make_tokenizer, NAMES), CharTokenizer("abc"), CharTokenizer("abd")]
    assert len({make_fingerprint(tokenizer) for tokenizer in tokenizers}) == len(tokenizers)


def test_an_unknown_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="sentencepiece"):
        restore_tokenizer({"name": "sentencepiece", "vocab_size": 7}, "here")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_take_the_smallest_type_that_holds_them(vocab_size: int, dtype: str) -> None:
    assert choose_dtype(vocab_size) == np.dtype(dtype)
    assert np.iinfo(choose_dtype(vocab_size)).max >= vocab_size - 1


@pytest.mark.realdata
def test_gpt2_ids_of_books_equal_those_of_openais_own_table(realdata: Path) -> None:
    lines = (realdata / "gpt2_bpe" / "r50k_base.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    reference = tiktoken.Encoding(
        "reference", pat_str=ORIGINAL_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    with lzma.open(realdata / "books" / "books_val.txt.xz", "rt", encoding="utf-8", newline="") as file:
        text = file.read(1_200_000)
    assert len(text) == 1_200_000
    assert make_tokenizer("gpt2").encode(text).tolist() == reference.encode_ordinary(text)


@pytest.mark.realdata
def test_tiny_shakespeare_has_65_characters(realdata: Path) -> None:
    text = (realdata / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    tokenizer = CharTokenizer.train([text])
    assert len(tokenizer.alphabet) == 65
    assert decode(tokenizer, tokenizer.encode(text).tolist()) == text
