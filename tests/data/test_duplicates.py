"""Deduplication: the first document in corpus order stays, and a kill changes nothing."""

from __future__ import annotations

import lzma
import random
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from gptmill.config.errors import UserError
from gptmill.config.requests import CleaningOptions
from gptmill.data.cleaning import Cleaner, DuplicateIndex, duplicates

EXACT = CleaningOptions(drop_duplicates=True)
NEAR = CleaningOptions(drop_near_duplicates=True)
BOTH = CleaningOptions(drop_duplicates=True, drop_near_duplicates=True)


def make_documents(count: int, words: int = 200) -> list[str]:
    generator = random.Random(0)
    vocabulary = [f"word{number}" for number in range(2000)]
    return [" ".join(generator.choices(vocabulary, k=words)) for _ in range(count)]


def replace_word(text: str, place: int, word: str = "changed") -> str:
    words = text.split(" ")
    words[place] = word
    return " ".join(words)


def drop(path: Path, options: CleaningOptions, documents: Iterable[str], resumed_at: int = 0) -> list[str | None]:
    """What happens to documents that each are a position of their own."""
    cleaner = Cleaner(options)
    with closing(DuplicateIndex(path, options, resumed_at)) as index:
        found = [
            index.find_duplicate(cleaner.make_keys(text), position)
            for position, text in enumerate(documents, resumed_at)
        ]
        index.commit()
    return found


def test_equal_texts_are_dropped_but_for_the_first(tmp_path: Path) -> None:
    found = drop(tmp_path / "seen", EXACT, ["a", "b", "a", "", "b", "", "a "])
    assert found == [None, None, "drop_duplicates", None, "drop_duplicates", "drop_duplicates", None]


def test_a_changed_word_makes_a_near_duplicate_and_not_an_equal_one(tmp_path: Path) -> None:
    first, second = make_documents(2)
    texts = [first, second, replace_word(first, 100), first, first.upper().replace(" ", ", ") + "!"]
    near, equal = "drop_near_duplicates", "drop_duplicates"
    assert drop(tmp_path / "near", NEAR, texts) == [None, None, near, near, near]
    assert drop(tmp_path / "both", BOTH, texts) == [None, None, near, equal, near]
    assert drop(tmp_path / "equal", EXACT, texts) == [None, None, None, equal, None]


@pytest.mark.slow
def test_near_duplicates_are_found_as_often_as_the_bands_promise(tmp_path: Path) -> None:
    documents = make_documents(600)
    for words_kept, low, high in ((195, 300, 300), (177, 240, 299), (133, 1, 60)):  # 95, 79 and 49 % shared
        others = [
            " ".join(text.split(" ")[:words_kept] + other.split(" ")[words_kept:])
            for text, other in zip(documents[:300], documents[300:], strict=True)
        ]
        found = drop(tmp_path / str(words_kept), NEAR, documents[:300] + others)
        assert found[:300] == [None] * 300
        assert low <= found[300:].count("drop_near_duplicates") <= high


@pytest.mark.parametrize("text", ["...", "one", "one two three", "日本語"], ids=ascii)
def test_short_texts_are_near_duplicates_of_themselves_alone(text: str, tmp_path: Path) -> None:
    assert drop(tmp_path / "seen", NEAR, ["!!", text, "two", text]) == [None, None, None, "drop_near_duplicates"]


def test_text_without_spaces_has_near_duplicates(tmp_path: Path) -> None:
    generator = random.Random(0)
    first, second = ("".join(chr(generator.randrange(0x4E00, 0x9FFF)) for _ in range(500)) for _ in range(2))
    changed = first[:250] + "变" + first[251:]
    assert drop(tmp_path / "seen", NEAR, [first, second, changed]) == [None, None, "drop_near_duplicates"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [EXACT, NEAR], ids=["exact", "near"])
@pytest.mark.parametrize("pending", [1, 100, 10**6])
def test_a_resumed_search_finds_what_an_unbroken_one_finds(
    options: CleaningOptions, pending: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "MAX_PENDING_KEYS", pending)
    documents = make_documents(20) * 2
    whole = drop(tmp_path / "whole", options, documents)
    assert whole.count(None) == 20
    drop(tmp_path / "broken", options, documents[:30])
    for resumed_at in (30, 15, 7, 39):
        if resumed_at == 39:
            drop(tmp_path / "broken", options, documents[7:39], 7)
        rest = drop(tmp_path / "broken", options, documents[resumed_at:], resumed_at)
        assert rest == whole[resumed_at:]


KILLED = """
import os, signal, sys
from pathlib import Path
from gptmill.config.requests import CleaningOptions
from gptmill.data.cleaning import Cleaner, DuplicateIndex, duplicates

duplicates.MAX_PENDING_KEYS = 2
options = CleaningOptions(drop_duplicates=True)
index, cleaner = DuplicateIndex(Path(sys.argv[1]), options, 0), Cleaner(options)
for position in range(10):
    for number in range(3):
        assert index.find_duplicate(cleaner.make_keys(f"{position} {number}"), position) is None
    if position == 6:
        index.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_search_resumes_from_any_position_it_had_committed(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60).returncode == -9
    cleaner = Cleaner(EXACT)
    with closing(DuplicateIndex(path, EXACT, 5)) as index:
        for position in range(10):
            expected = "drop_duplicates" if position < 5 else None
            assert index.find_duplicate(cleaner.make_keys(f"{position} 2"), 5) == expected


def test_what_was_not_committed_is_forgotten(tmp_path: Path) -> None:
    drop(tmp_path / "seen", EXACT, ["a"])
    keys = Cleaner(EXACT).make_keys("b")
    for _ in range(2):
        with closing(DuplicateIndex(tmp_path / "seen", EXACT, 1)) as index:
            assert index.find_duplicate(keys, 1) is None


def test_a_new_search_forgets_whatever_the_file_held(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    path.write_bytes(b"no database" * 1000)
    assert drop(path, EXACT, ["a"]) == [None]
    assert drop(path, NEAR, ["a"]) == [None]


def test_documents_without_keys_are_never_duplicates(tmp_path: Path) -> None:
    assert drop(tmp_path / "seen", CleaningOptions(), ["a", "a"]) == [None, None]


def test_an_index_that_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    with pytest.raises(UserError, match=r"is missing.*remove the folder"):
        DuplicateIndex(path, EXACT, 3)
    drop(path, EXACT, ["a"])
    with pytest.raises(UserError, match=r"other keys.*remove the folder"):
        DuplicateIndex(path, NEAR, 1)
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match=r"cannot be used.*remove the folder"):
        DuplicateIndex(path, EXACT, 1)


@pytest.mark.slow
def test_two_processes_cannot_use_one_index(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    drop(path, EXACT, ["a"])
    with closing(DuplicateIndex(path, EXACT, 1)), pytest.raises(UserError, match="locked"):
        DuplicateIndex(path, EXACT, 1)


@pytest.mark.realdata
def test_in_real_text_copies_are_found_and_little_else(realdata: Path, tmp_path: Path) -> None:
    with lzma.open(realdata / "books" / "books_val.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read(1_000_000)
    documents = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    copies = [document[:2000] + " changed " + document[2000:] for document in documents]
    found = drop(tmp_path / "seen", BOTH, documents + copies)
    assert found[: len(documents)].count(None) >= 0.99 * len(documents)
    assert set(found[len(documents) :]) == {"drop_near_duplicates"}
