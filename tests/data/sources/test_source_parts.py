"""Parts: together exactly the documents of the whole file, each once, in order, in any process."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Part, SourceFile, list_parts, open_documents, resolve_source

OPTIONS = ReadingOptions()


def make_texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [f"{number} " + "é" * int(generator.paretovariate(0.7)) for number in range(count)]


def write_lines(path: Path, texts: list[str], end: str) -> SourceFile:
    path.write_bytes(end.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode())
    return resolve_source([str(path)], OPTIONS).files[0]


def read_part(file: SourceFile, part: Part | None) -> tuple[list[str], int]:
    with open_documents(file, OPTIONS, part) as documents:
        return list(documents), documents.bytes_read


def read_parts(file: SourceFile, parts: tuple[Part, ...]) -> list[str]:
    found = []
    for part in parts:
        documents, bytes_read = read_part(file, part)
        assert bytes_read == part.size_bytes
        found += documents
    assert sum(part.size_bytes for part in parts) == file.size_bytes
    return found


@pytest.fixture
def no_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.data.sources.parts.SMALL_FILE_BYTES", 0)


@pytest.mark.usefixtures("no_small_files")
@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1000, 10**9])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_lines_belong_to_the_part_in_which_they_begin(
    part_bytes: int, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gptmill.data.sources.parts.PART_BYTES", part_bytes)
    texts = make_texts(40, part_bytes)
    file = write_lines(tmp_path / "a.jsonl", texts, end)
    parts = list_parts(file, OPTIONS)
    assert parts is not None
    assert len(parts) == -(-file.size_bytes // part_bytes)
    assert read_parts(file, parts) == texts == read_part(file, None)[0]


@pytest.mark.usefixtures("no_small_files")
@pytest.mark.parametrize("part_bytes", [1, 300, 10**9])
def test_row_groups_are_gathered_into_parts(part_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gptmill.data.sources.parts.PART_BYTES", part_bytes)
    texts = make_texts(50, 1)
    pq.write_table(pa.table({"text": texts, "n": range(50)}), tmp_path / "a.parquet", row_group_size=3)
    file = resolve_source([str(tmp_path)], OPTIONS).files[0]
    parts = list_parts(file, OPTIONS)
    assert parts is not None
    assert len(parts) == {1: 17, 10**9: 1}.get(part_bytes, len(parts))
    assert read_parts(file, parts) == texts == read_part(file, None)[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".jsonl.gz"])
def test_a_small_file_is_one_part_whatever_it_is(suffix: str, tmp_path: Path) -> None:
    texts = make_texts(20, 2)
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=3)
    else:
        content = "\n".join(map(json.dumps, texts)).encode()
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    file = resolve_source([str(path)], OPTIONS).files[0]
    parts = list_parts(file, OPTIONS)
    assert parts is not None
    assert len(parts) == 1
    assert read_parts(file, parts) == texts


@pytest.mark.usefixtures("no_small_files")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.csv", "a.parquet.gz"])
def test_a_stream_that_cannot_be_cut_has_no_parts(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"anything")
    assert list_parts(resolve_source([str(tmp_path)], OPTIONS).files[0], OPTIONS) is None


@pytest.mark.usefixtures("no_small_files")
def test_a_bad_line_in_a_part_is_named_by_its_number_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gptmill.data.sources.parts.PART_BYTES", 50)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' * 20 + b"{oops\n" + b'{"text": "fine"}\n' * 5)
    file = resolve_source([str(path)], OPTIONS).files[0]
    parts = list_parts(file, OPTIONS)
    assert parts is not None
    with pytest.raises(UserError, match=r"a\.jsonl:21 is not JSON"):
        read_parts(file, parts)


@pytest.mark.usefixtures("no_small_files")
def test_another_process_reads_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gptmill.data.sources.parts.PART_BYTES", 200)
    texts = make_texts(30, 3)
    file = write_lines(tmp_path / "a.jsonl", texts, "\n")
    parts = list_parts(file, OPTIONS)
    assert parts is not None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.starmap(read_in_process, [(file, part) for part in parts])
    assert [text for of_part in found for text in of_part] == texts


def read_in_process(file: SourceFile, part: Part) -> list[str]:
    texts, _ = read_part(file, part)
    return texts
