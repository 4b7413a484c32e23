"""Long documents: cut at words, the same however the text arrives, and without a character lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import MAX_DOCUMENT_CHARS, SourceFile, open_documents


def read(path: Path, **options: str) -> list[str]:
    with open_documents(SourceFile(str(path), path.name, path.stat().st_size, 0), ReadingOptions(**options)) as stream:
        return list(stream)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("gptmill.data.sources.cutting.MAX_DOCUMENT_CHARS", 100)
    monkeypatch.setattr("gptmill.data.sources.cutting.SEARCHED_CHARS", 30)
    return 100


@pytest.mark.parametrize("block_bytes", [1, 13, 99, 1000, 2**20])
def test_cuts_lie_between_words_and_do_not_depend_on_blocks(
    block_bytes: int, short_limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gptmill.data.sources.formats.text.BLOCK_BYTES", block_bytes)
    generator = random.Random(0)
    text = " ".join("".join(generator.choices("abcdé漢", k=generator.randrange(1, 12))) for _ in range(500))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    documents = read(tmp_path / "a.txt")
    assert "".join(documents) == text
    assert all(len(document) <= short_limit for document in documents)
    assert all(document[0] == " " and not document[-1].isspace() for document in documents[1:-1])
    assert sum(map(len, documents)) / len(documents) > short_limit - 15
    assert read(tmp_path / "a.jsonl") == documents


def test_a_document_may_be_exactly_as_long_as_the_limit(short_limit: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * short_limit)
    assert read(tmp_path / "a.txt") == ["x" * short_limit]
    (tmp_path / "a.txt").write_text("x" * short_limit + " y")
    assert read(tmp_path / "a.txt") == ["x" * short_limit, " y"]


def test_what_has_no_words_is_cut_hard(short_limit: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " + "x" * 2 * short_limit)
    assert [len(document) for document in read(tmp_path / "a.txt")] == [short_limit, short_limit, 5]


def test_documents_between_separators_are_cut_each_by_itself(short_limit: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 150 + "#\n" + "y" * 150)
    lengths = [(document[0], len(document)) for document in read(tmp_path / "a.txt", separator="#")]
    assert lengths == [("x", short_limit), ("x", 50), ("y", short_limit), ("y", 50)]


def test_the_real_limit_holds(tmp_path: Path) -> None:
    text = "lorem ipsum " * (MAX_DOCUMENT_CHARS // 10)
    (tmp_path / "a.txt").write_text(text)
    documents = read(tmp_path / "a.txt")
    assert "".join(documents) == text
    assert [len(document) for document in documents[:-1]] == [MAX_DOCUMENT_CHARS - 1 - (MAX_DOCUMENT_CHARS - 6) % 6]
