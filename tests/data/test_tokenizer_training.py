"""Training a tokenizer: the file means the same to every library, is the same every time, and says what it is worth."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import build_tokenizer
from gptmill.data.tokenizers.bpe_training import Training, train_tokenizer
from gptmill.data.tokenizers.protocol import decode
from gptmill.data.tokenizers.tiktoken_conversion import convert_to_tiktoken

pytestmark = pytest.mark.slow

PROBE = "Rain's 12345 drops\r\n\n  fall  <|endoftext|>\tON été, 漢字🙂 \u00a0 and THE rains'd go\n"


def make_texts() -> list[str]:
    """About 600 kB of made-up words in lines, some documents long, some short."""
    generator = random.Random(0)
    syllables = "ra in fa ll ri ver sto ne old to wn é 漢 ing the 12 'll".split()
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(2_000)]
    lines = [" ".join(generator.choices(words, k=12)) + "\n" for _ in range(8_000)]
    return ["".join(lines[:4_000]), *("".join(lines[at : at + 8]) for at in range(4_000, 8_000, 8))]


def train(texts: list[str], vocab_size: int = 1_000, max_bytes: int = 10**9) -> Training:
    return train_tokenizer(texts, vocab_size, max_bytes, lambda _: None)


@pytest.fixture(scope="module")
def trained() -> Training:
    return train(make_texts())


def test_every_library_gives_the_same_ids(trained: Training, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tokenizer.json"
    path.write_text(trained.definition, encoding="utf-8")
    tokenizer = build_tokenizer(str(path), [])
    library = Library.from_file(str(path))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert tokenizer.vocab_size == library.get_vocab_size() == len(theirs) == 1_000
    assert tokenizer.end_of_text == theirs.convert_tokens_to_ids("<|endoftext|>") == 999
    for text in (*make_texts()[:3], PROBE.replace("<|endoftext|>", "")):
        ids = tokenizer.encode(text).tolist()
        assert ids == library.encode(text).ids == theirs.encode(text)
        assert decode(tokenizer, ids) == theirs.decode(ids) == text
    assert decode(tokenizer, tokenizer.encode(PROBE).tolist()) == PROBE
    assert tokenizer.end_of_text not in tokenizer.encode(PROBE)


def test_what_is_trained_here_takes_the_fast_path(trained: Training) -> None:
    library = Library.from_str(trained.definition)
    library.encode_special_tokens = True
    assert convert_to_tiktoken(json.loads(trained.definition), library) is not None


def test_training_again_gives_the_same_file(trained: Training) -> None:
    assert train(make_texts()).definition == trained.definition


def test_what_it_is_worth_is_measured_on_text_that_it_has_not_seen(trained: Training) -> None:
    texts = make_texts()
    assert trained.text_bytes == sum(len(text.encode()) for text in texts)
    assert trained.is_whole
    assert trained.on_held_out is not None
    assert 1 < trained.on_held_out.bytes_per_token <= trained.on_training.bytes_per_token * 1.1
    # A vocabulary made for these words beats GPT-2's, fifty times as large.
    assert trained.on_held_out.bytes_per_token > trained.on_held_out.gpt2_bytes_per_token
    assert 0.5 < trained.used_share <= 1
    assert len(trained.longest[0]) >= len(trained.longest[-1]) > 4


def test_text_beyond_the_limit_is_not_read() -> None:
    texts = make_texts()
    limited = train(texts, 400, max_bytes=100_000)
    assert 80_000 < limited.text_bytes <= 100_000
    assert not limited.is_whole
    assert limited.definition == train([texts[0], "other " * 5_000], 400, max_bytes=100_000).definition


def test_reading_is_reported() -> None:
    reports: list[int] = []
    training = train_tokenizer(make_texts(), 300, 10**9, reports.append)
    assert reports == sorted(reports)
    assert reports[-1] == training.text_bytes


def test_a_very_long_run_of_white_space_is_learnt_from(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train([" " * 1_500_000 + "the rain"], 260).definition, encoding="utf-8")
    tokenizer, text = build_tokenizer(str(path), []), " " * 1_500_000 + "end"
    assert decode(tokenizer, tokenizer.encode(text).tolist()) == text


def test_too_little_text_says_how_many_merges_it_holds() -> None:
    with pytest.raises(UserError, match=r"yield 10 merges; .* at most 267"):
        train(["hello hello world"], 300)
    assert train(["hello hello world"], 267).vocab_size == 267
    with pytest.raises(UserError, match="contains no text"):
        train([], 300)


def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    with pytest.raises(UserError, match=r"pip install 'gptmill\[data\]'"):
        train(["hello"], 300)
