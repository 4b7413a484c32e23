"""Sources made to exhaust memory or time: one sentence, or their text, with little of either."""

from __future__ import annotations

import bz2
import io
import lzma
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import GptMill, Start
from test_source_formats import make_page, make_record, read, write

from gptmill.config import json_text
from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import SourceFile, open_documents
from gptmill.data.sources.compression import DecompressedFile
from gptmill.data.sources.expansion import FREE_BYTES
from gptmill.data.sources.formats import json_records, tables, web
from gptmill.data.sources.formats.html_text import is_parsable, strip_tags

MIB = 2**20
BOMB_BYTES = 40 * MIB
SPARE_BYTES = 200 * MIB


def pack_in_one(compressor: Any) -> bytes:
    """BOMB_BYTES of one letter as a single member."""
    return b"".join([*(compressor.compress(b"a" * MIB) for _ in range(BOMB_BYTES // MIB)), compressor.flush()])


def make_zstd_bomb() -> bytes:
    """A frame of blocks that repeat one byte: 4 bytes for each 128 KiB (RFC 8878)."""
    blocks = BOMB_BYTES // 2**17
    block = (2**17 << 3 | 1 << 1).to_bytes(3, "little")
    last = (2**17 << 3 | 1 << 1 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\x00\x58" + (block + b"a") * (blocks - 1) + last + b"a"


BOMBS: dict[str, Callable[[], bytes]] = {
    ".gz": lambda: pack_in_one(zlib.compressobj(9, wbits=31)),
    ".bz2": lambda: pack_in_one(bz2.BZ2Compressor()),
    ".xz": lambda: pack_in_one(lzma.LZMACompressor(preset=0)),
    ".zst": make_zstd_bomb,
}


def read_all(file: SourceFile, **options: Any) -> list[str]:
    """As `read` does, but of a file that need not be read to its end."""
    with open_documents(file, ReadingOptions(**options)) as documents:
        return list(documents)


@contextmanager
def limit_memory(max_bytes: int) -> Iterator[None]:
    """Asserts that the code allocates no more than this at any moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < max_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packing", BOMBS)
def test_a_bomb_takes_little_memory_and_is_stopped(packing: str, tmp_path: Path) -> None:
    bomb = BOMBS[packing]()
    content = io.BufferedReader(DecompressedFile(io.BytesIO(bomb), packing, "bomb", None), MIB)
    with limit_memory(36 * MIB if packing == ".zst" else 8 * MIB):
        assert sum(len(block) for block in iter(lambda: content.read(MIB), b"")) == BOMB_BYTES
    with pytest.raises(UserError, match=rf"a\.txt\{packing} expands [\d,]+-fold .*--max_expansion 1000"):
        read(write(tmp_path, f"a.txt{packing}", bomb))


def test_text_that_compresses_well_is_read(tmp_path: Path) -> None:
    free = zstandard.ZstdCompressor().compress(b"word " * (FREE_BYTES // 5))
    assert sum(map(len, read(write(tmp_path, "free.txt.zst", free)))) == FREE_BYTES // 5 * 5
    lines = zlib.compress(
        b"".join(b"%d the same words in every line\n" % number for number in range(700_000)), wbits=31
    )
    assert read(write(tmp_path, "lines.txt.gz", lines))


def test_the_limit_is_an_option(tmp_path: Path) -> None:
    text = b"".join(b"%07d words\n" % number for number in range(1_500_000))
    file = write(tmp_path, "a.txt.gz", zlib.compress(text, 1, wbits=31))
    with pytest.raises(UserError, match=r"more than --max_expansion 2\.5 allows"):
        read(file, max_expansion=2.5)
    assert sum(map(len, read(file, max_expansion=None))) == len(text)
    assert 0 < sum(map(len, read_all(file, max_expansion=2.5, on_error="skip"))) < len(text)


@pytest.mark.parametrize("ratio", ["0.5", "nan", "-1"])
def test_a_limit_below_one_is_refused(ratio: str, gptmill: GptMill, text_file: Path) -> None:
    process = gptmill("prepare", text_file, "--max_expansion", ratio, check=False)
    assert process.returncode == 2
    assert "--max_expansion" in process.stderr


def test_the_limit_is_no_part_of_the_corpus(gptmill: GptMill, text_file: Path) -> None:
    for ratio in ("none", "10"):
        gptmill("prepare", text_file, "--tokenizer", "byte", "--max_expansion", ratio)


# JSON and tables


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_json_value_of_millions_of_lists_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(json_records, "MAX_VALUE_BYTES", 2**24)  # reserved, although never touched
    content = b'{"text": "a", "other": [' + b"[]," * 5_000_000 + b"[]]}"
    with limit_memory(5 * len(content)), pytest.raises(UserError, match=rf"{name}.* more than 4,194,304 values"):
        read(write(tmp_path, name, content))


def test_brackets_inside_a_text_are_no_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(json_text, "MAX_VALUES", 2)
    monkeypatch.setattr(json_text, "SMALL_CHARS", 4)
    assert read(write(tmp_path, "a.jsonl", rb'{"text": "[[[[{{{{,,,, \" \\"}')) == ['[[[[{{{{,,,, " \\']


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deeply_nested_json_is_refused(suffix: str, opening: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nested too deeply"):
        read(write(tmp_path, f"a{suffix}", opening * 100_000))


def test_a_row_of_too_many_fields_or_lines_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "MAX_ROW_FIELDS", 10)
    many_rows = b"text,other\n" + b"word,x\n" * 50
    assert read(write(tmp_path, "good.csv", many_rows)) == ["word"] * 50
    for name, content in (("fields.csv", b"text\n" + b"," * 20), ("lines.csv", b"text\n" + b'"\n",' * 20)):
        with pytest.raises(UserError, match=rf"{name} has a row of more than"):
            read(write(tmp_path, name, content))


# Parquet


def test_a_parquet_dictionary_bomb_takes_little_memory_and_is_stopped(tmp_path: Path, start: Start) -> None:
    rows = 2000
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["word " * (MIB // 5)]))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=rows, store_schema=False)
    flags = ["--tokenizer", "byte", "--processes", "1"]
    process = start("prepare", "a.parquet", *flags, "--out", "shards", spare_memory_bytes=3 * SPARE_BYTES)
    output, _ = process.communicate()
    assert process.returncode == 2, output
    assert "a.parquet expands" in output


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", None])
def test_every_encoding_of_parquet_is_read(encoding: str | None, tmp_path: Path) -> None:
    texts = [None, *(f"text {number}" for number in range(3000)), "x" * 5000, ""]
    path = tmp_path / "a.parquet"
    column_encoding = {"text": encoding} if encoding else None
    pq.write_table(pa.table({"text": texts}), path, use_dictionary=encoding is None, column_encoding=column_encoding)
    assert read(write(tmp_path, "a.parquet", path.read_bytes())) == [text for text in texts if text]


# Pages


@pytest.mark.parametrize(
    "unit", ["<div>", "<ul><li>", "<div></x>", "<b id={}><p>x ", "<a href={}><div>x ", "<", "<!--", "<script>", "&"]
)
def test_a_page_nested_without_end_is_read_in_linear_time(unit: str, tmp_path: Path) -> None:
    page = "<p>The text.</p>" + "".join(unit.replace("{}", str(number)) for number in range(100_000))
    started = time.monotonic()
    (text,) = read(write(tmp_path, "a.html", page.encode()))
    assert "The text." in text
    assert time.monotonic() - started < 10


def test_only_pages_that_nest_too_deep_lose_their_structure() -> None:
    assert is_parsable(make_page("<li>one<li>two<br>" * 5000 + "<div><b>x</b></div>" * 5000))
    assert not is_parsable("<div>" * 1000)
    hidden = "<title>No</title><script>if (a < b) no()</script><style>no</style><!-- no -->"
    assert strip_tags(f"{hidden}<p>A &amp; <b>b</b>old</p><div>c<br>1 < 2</div>") == "A & bold\nc\n1 < 2"


def test_a_page_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(web, "MAX_PAGE_BYTES", 2**16)
    packed = zlib.compress(make_page("x" * 2**17).encode(), wbits=31)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n"
    for name, content in (
        ("a.html", make_page("x" * 2**17).encode()),
        ("a.warc", make_record("response", head + packed)),
        ("a.wet", make_record("conversion", b"x" * 2**17)),
    ):
        with pytest.raises(UserError, match=rf"{name} is a page of more than"):
            read(write(tmp_path, name, content))
    archive = make_record("conversion", b"x" * 2**17) + make_record("conversion", b"The next record.")
    assert read(write(tmp_path, "b.wet", archive), on_error="skip") == ["The next record."]
