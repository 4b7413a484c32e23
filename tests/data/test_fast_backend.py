"""gigatoken: the same ids as tiktoken for every text, and tiktoken where gigatoken is absent or cannot be trusted."""

from __future__ import annotations

import lzma
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptmill.data.tokenizers import fast_backend, gpt2_bpe
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint

gigatoken = pytest.importorskip("gigatoken")

pytestmark = pytest.mark.slow

WHITE_SPACE = " \n\t\r\x0b\x0c\x1c\x85\u00a0\u1680\u2028\u2029\u3000"
# Letters of a Unicode that gigatoken knows and tiktoken does not, in the planes 0, 1, 2 and 3.
NEW_LETTERS = "\u088f\u0c5c\u0cdc\ua7ce\ua7d2\ua7f1\U00010940\U00010ec5\U000323b0\U00033479"
LONG = 300_000
IN_A_FORK = """
import os
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer

def count_threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1

tokenizer = Gpt2Tokenizer()
text = "It's the 1st of many, naïve – words.\\n" * 100_000
before = count_threads()
ids = tokenizer.encode(text)
assert count_threads() == before
assert tokenizer.encoder.startswith("gigatoken")
child = os.fork()
if not child:
    os._exit(0 if (tokenizer.encode(text) == ids).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def tiktokens() -> Gpt2Tokenizer:
    """By tiktoken alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gigatoken", None)
        return build_eager()


@pytest.fixture(scope="module")
def gigatokens() -> Gpt2Tokenizer:
    """By gigatoken, from the next text on."""
    tokenizer = build_eager()
    tokenizer.encode("a " * fast_backend.START_AFTER_CHARACTERS)
    return tokenizer


@pytest.fixture
def gigatoken_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that gigatoken is asked for from now on."""
    calls: list[str] = []
    encode = gigatoken.Tokenizer.encode

    def record(self: Any, text: str) -> Any:
        calls.append(text)
        return encode(self, text)

    monkeypatch.setattr(gigatoken.Tokenizer, "encode", record)
    return calls


def build_eager() -> Gpt2Tokenizer:
    """A tokenizer that has decided by which library it encodes."""
    tokenizer = Gpt2Tokenizer()
    assert tokenizer.encoder
    return tokenizer


def check_same(text: str, gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer) -> None:
    ids = gigatokens.encode(text)
    assert ids.dtype == np.uint16
    np.testing.assert_array_equal(ids, tiktokens.encode(text))


def test_each_tokenizer_names_the_library_that_it_uses(gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer) -> None:
    assert gigatokens.encoder == f"gigatoken {version('gigatoken')}"
    assert tiktokens.encoder == f"tiktoken {version('tiktoken')}"
    assert gigatokens.spec() == tiktokens.spec()
    assert make_fingerprint(gigatokens) == make_fingerprint(tiktokens)


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(st.sampled_from("aZé漢1٣½.'<|🙂stlvdmre" + WHITE_SPACE))
)
@example(text="")
@example(text="<|endoftext|> a<|endoftext|>")
@example(text="don't DON'T I'll we've 's 'S ''s x's' 'tis")
@example(text="\x00\x01\x7f\ufeff \ufffe\U000e0001\U0010ffff")
@example(text="١٢٣ ४५६ ⅷ ² ½ a\u0301e\u0308 \u1680\u180e\u200b x")
@example(text="🙂👩‍👩‍👧🏽🏴󠁧󠁢󠁥󠁮󠁧󠁿 𝐛𝐨𝐥𝐝")
@settings(deadline=None, max_examples=100)
def test_any_text_has_the_same_ids(text: str, gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer) -> None:
    check_same(text, gigatokens, tiktokens)


@pytest.mark.parametrize("letter", NEW_LETTERS, ids=ascii)
def test_letters_that_tiktoken_does_not_know_have_its_ids(
    letter: str, gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer
) -> None:
    check_same(f"{letter}'d a{letter}b 1{letter}1 !{letter}! {letter}{letter} the", gigatokens, tiktokens)


@pytest.mark.parametrize(
    "text",
    [
        " " * LONG,
        " " * LONG + "end",
        "begin" + "\n" * LONG + "end",
        "begin " + "\u00a0" * 100_000 + "end",
        "begin" + " " * 99_999 + "end" + " " * 100_000 + "end",
        " \n\t" * 100_000 + "漢",
        "a" * LONG,
        "漢" * 100_000,
        "0123456789" * 100_000,
        "'" * 100_000,
        "é1 " * 50_000,
        "\x00" * 100_000,
    ],
    ids=lambda text: f"{len(text)} of {text[6:9]!a}",
)
def test_long_runs_have_the_same_ids(text: str, gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer) -> None:
    check_same(text, gigatokens, tiktokens)


@pytest.mark.parametrize("seed", range(4))
def test_long_mixtures_have_the_same_ids(
    seed: int, gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer, gigatoken_calls: list[str]
) -> None:
    generator = random.Random(seed)
    common = [chr(point) for point in generator.sample(fast_backend.COMMON, 2000) if chr(point) not in NEW_LETTERS]
    pools = [WHITE_SPACE, "abcABC'stmdlvre", "0123456789", ".,!?-_<|>'\"", common, [" the", "'ll", "<|endoftext|>"]]
    chosen = generator.sample(pools, 3)
    text = "".join(generator.choice(generator.choice(chosen)) for _ in range(100_000))
    check_same(text, gigatokens, tiktokens)
    assert gigatoken_calls == [text]


def test_a_lone_surrogate_is_refused_as_ever(gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer) -> None:
    for tokenizer in (gigatokens, tiktokens):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("a\ud800b")


def test_gigatoken_gets_the_texts_that_both_cut_alike_and_no_other(
    gigatokens: Gpt2Tokenizer, gigatoken_calls: list[str]
) -> None:
    plain = ["It's text.", "naïve – 漢字 🙂", ""]
    for text in [*plain, f"It's {NEW_LETTERS[0]}", "\U00033479", " " * LONG + "end"]:
        gigatokens.encode(text)
    assert gigatoken_calls == plain


def test_a_little_text_does_not_start_it(gigatoken_calls: list[str]) -> None:
    tokenizer = Gpt2Tokenizer()
    tokenizer.encode("a few words")
    assert not gigatoken_calls
    tokenizer.encode("many words " * 300_000)
    assert gigatoken_calls


@pytest.mark.parametrize(
    "encode",
    [
        lambda _, ids: ids[::-1],
        lambda _, ids: np.where(ids == 11, 13, ids),
        lambda text, ids: ids if len(text) < 1000 else ids[:-1],
        lambda text, _: [][len(text)],
    ],
    ids="reversed commas cut raising".split(),
)
def test_a_gigatoken_that_errs_is_not_used(
    encode: Callable[[str, Any], Any], tiktokens: Gpt2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gigatoken.Tokenizer.encode
    monkeypatch.setattr(gigatoken.Tokenizer, "encode", lambda self, text: encode(text, original(self, text)))
    monkeypatch.setattr(gpt2_bpe, "START_AFTER_CHARACTERS", 0)
    tokenizer = build_eager()
    assert tokenizer.encoder == tiktokens.encoder
    check_same("It's naïve, and plain text.", tokenizer, tiktokens)


def test_a_gigatoken_that_cannot_be_made_is_not_used(tiktokens: Gpt2Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gigatoken.Tokenizer, "from_tiktoken")
    assert build_eager().encoder == tiktokens.encoder


def test_a_gigatoken_that_knows_fewer_letters_does_not_get_them(
    tiktokens: Gpt2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gigatoken.Tokenizer.encode
    # To it, "é" is a sign.
    monkeypatch.setattr(gigatoken.Tokenizer, "encode", lambda self, text: original(self, text.replace("é", "§")))
    monkeypatch.setattr(fast_backend, "_make_words", lambda _: "words without it")
    monkeypatch.setattr(gpt2_bpe, "START_AFTER_CHARACTERS", 0)
    tokenizer = build_eager()
    assert tokenizer.encoder.startswith("gigatoken")
    check_same("un été à la mer", tokenizer, tiktokens)


def test_a_panic_on_one_text_loses_nothing(tiktokens: Gpt2Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As gigatoken's, which are no Exceptions."""

    def encode(self: Any, text: str) -> Any:
        if text == "fatal words":
            raise Panic
        return original(self, text)

    original = gigatoken.Tokenizer.encode
    monkeypatch.setattr(gigatoken.Tokenizer, "encode", encode)
    monkeypatch.setattr(gpt2_bpe, "START_AFTER_CHARACTERS", 0)
    tokenizer = build_eager()
    for text in ("some words", "fatal words", "other words"):
        check_same(text, tokenizer, tiktokens)


def test_its_memory_is_renewed(tiktokens: Gpt2Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    original = gigatoken.Tokenizer.from_tiktoken
    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_tiktoken", lambda path, **options: made.append(path) or original(path, **options)
    )
    monkeypatch.setattr(fast_backend, "RENEW_AFTER_TOKENS", 100)
    monkeypatch.setattr(gpt2_bpe, "START_AFTER_CHARACTERS", 0)
    tokenizer = build_eager()
    made.clear()
    for _ in range(10):
        check_same("It's thirty tokens or so. " * 5, tokenizer, tiktokens)
    assert len(made) == 3
    assert not any(path.exists() for path in made)


def test_it_works_in_processes_that_are_spawned(gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer) -> None:
    assert pickle.loads(pickle.dumps(gigatokens)).spec() == gigatokens.spec()
    text = "It's text, naïve. " * 200_000
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(getattr, gigatokens, "encoder").result() == gigatokens.encoder
        np.testing.assert_array_equal(pool.submit(gigatokens.encode, text).result(), tiktokens.encode(text))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_it_works_after_a_fork_and_starts_no_threads() -> None:
    process = subprocess.run(
        [sys.executable, "-c", IN_A_FORK], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.realdata
def test_books_have_the_same_ids(realdata: Path, gigatokens: Gpt2Tokenizer, tiktokens: Gpt2Tokenizer) -> None:
    with lzma.open(realdata / "books" / "books_val.txt.xz", "rt", encoding="utf-8", newline="") as file:
        check_same(file.read(), gigatokens, tiktokens)
