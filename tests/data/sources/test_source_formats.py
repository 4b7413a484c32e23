"""Formats: the same text gives the same documents in whatever it is wrapped, and what is wrong is named."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import FORMATS, SourceFile, open_documents, read_documents, resolve_source
from gptmill.data.sources.formats import lines

TEXTS = ["One page, with a comma.", 'A "quoted"\ttab,\nand two\r\nlines.', "漢字 🙂 é" * 50, "last"]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def make_jsonl(texts: list[str]) -> bytes:
    rows = [json.dumps({"id": 1, "text": text}) for text in texts]
    return "\n".join([rows[0], "", json.dumps(texts[1]), '{"text": null}', *rows[2:]]).encode()


def make_table(texts: list[str], delimiter: str) -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *(("x", text) for text in texts)])
    return file.getvalue().encode()


def make_parquet(texts: list[str | None]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), file, row_group_size=2)
    return file.getvalue()


def make_record(kind: str, content: bytes) -> bytes:
    header = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Date: 2024-01-01T00:00:00Z\r\nContent-Length: {len(content)}\r\n"
    extra = "WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000000>\r\n"
    extra += "Content-Type: application/http; msgtype=response\r\n" if kind == "response" else ""
    return f"{header}{extra}\r\n".encode() + content + b"\r\n\r\n"


def make_page(text: str) -> str:
    return f"<html><head><title>x</title></head><body><nav>Menu</nav><main><p>{text}</p></main></body></html>"


def make_answer(text: str, content_type: str = "text/html; charset=utf-8") -> bytes:
    return make_record("response", f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n\r\n{make_page(text)}".encode())


PAGES = ["One page, with a comma.", "漢字 🙂 é", "last"]
CONTENTS: dict[str, tuple[bytes, list[str]]] = {
    ".txt": ("\n".join(TEXTS).encode(), ["\n".join(TEXTS)]),
    ".md": (TEXTS[2].encode(), [TEXTS[2]]),
    ".py": ("# coding: latin-1\nname = 'é'".encode("latin-1"), ["# coding: latin-1\nname = 'é'"]),
    ".jsonl": (make_jsonl(TEXTS), TEXTS),
    ".ndjson": (make_jsonl(TEXTS), TEXTS),
    ".json": (json.dumps([{"text": text} for text in TEXTS], indent=1).encode(), TEXTS),
    ".csv": (make_table(TEXTS, ","), TEXTS),
    ".tsv": (make_table(TEXTS, "\t"), TEXTS),
    ".parquet": (make_parquet([TEXTS[0], None, *TEXTS[1:]]), TEXTS),
    ".html": (make_page("Hello, page.").encode(), ["Hello, page."]),
    ".warc": (
        make_record("warcinfo", b"x: y")
        + b"".join(make_answer(page) for page in PAGES)
        + make_answer("skip", "text/css"),
        PAGES,
    ),
    ".wet": (make_record("warcinfo", b"x: y") + b"".join(make_record("conversion", t.encode()) for t in TEXTS), TEXTS),
}


def write(folder: Path, name: str, content: bytes) -> SourceFile:
    path = folder / name
    path.write_bytes(content)
    return SourceFile(str(path), name, len(content), 0)


def read(file: SourceFile, **options: Any) -> list[str]:
    with open_documents(file, ReadingOptions(**options)) as documents:
        found = list(documents)
        assert documents.bytes_read == file.size_bytes
    return found


@pytest.mark.parametrize("suffix", CONTENTS)
def test_every_format_in_every_compression_gives_its_documents(suffix: str, tmp_path: Path) -> None:
    content, expected = CONTENTS[suffix]
    assert suffix in FORMATS
    for packing, pack in PACKERS.items():
        assert read(write(tmp_path, f"corpus{suffix}{packing}", pack(content))) == expected, packing


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
def test_members_one_after_the_other_are_one_file(packing: str, tmp_path: Path) -> None:
    pack = PACKERS[packing]
    content = pack(b"one ") + pack(b"") + pack(b"two ") + pack(b"three")
    assert read(write(tmp_path, f"a.txt{packing}", content)) == ["one two three"]


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_truncated_compressed_file_is_reported_with_the_offset(packing: str, share: float, tmp_path: Path) -> None:
    content = PACKERS[packing](" ".join(str(number**3) for number in range(20_000)).encode())
    cut = content[: int(len(content) * share)]
    with pytest.raises(UserError, match=rf"a\.txt\{packing} is truncated.* byte {len(cut):,},"):
        read(write(tmp_path, f"a.txt{packing}", cut))


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
def test_a_file_that_is_not_what_its_suffix_says_is_named(packing: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"a\.txt\{packing} is not a valid {packing[1:]} file"):
        read(write(tmp_path, f"a.txt{packing}", b"just text"))


def test_a_compressed_bit_that_flipped_is_noticed(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"some text " * 1000))
    content[-6] ^= 1
    with pytest.raises(UserError, match=r"a\.txt\.gz is not a valid gz file"):
        read(write(tmp_path, "a.txt.gz", bytes(content)))


# Plain text


def test_text_that_comes_in_blocks_is_the_same_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gptmill.data.sources.formats.text.BLOCK_BYTES", 7)
    assert read(write(tmp_path, "a.txt", TEXTS[2].encode())) == [TEXTS[2]]
    with pytest.raises(UserError, match="byte 0xff at offset 24"):
        read(write(tmp_path, "b.txt", "漢字漢字漢字漢字".encode() + b"\xff tail"))
    with pytest.raises(UserError, match="byte 0xe6 at offset 6"):
        read(write(tmp_path, "c.txt", "漢字漢".encode()[:-1]))


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("separator", "content", "expected"),
    [
        ("<|end|>", "one\n<|end|>\ntwo<|end|>three", ["one\n", "two", "three"]),
        ("<|end|>", "<|end|>\r\n\r\none <|end <|end|> <|end|><|end|>\n", ["\r\none <|end "]),
        ("\\n\\n", "a\nb\n\nc\n\n\nd", ["a\nb", "c", "\nd"]),
        ("\\n<|end|>\\n", "one\n<|end|>\n\ntwo\n\n<|end|>\nthree", ["one", "\ntwo\n", "three"]),
        ("\\t", "a\tb\t", ["a", "b"]),
        ("aab", "xaaabyaaab", ["xa", "ya"]),
        ("%", "a%\r", ["a"]),
    ],
)
def test_separators_cut_text_wherever_blocks_end(
    separator: str,
    content: str,
    expected: list[str],
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("gptmill.data.sources.formats.text.BLOCK_BYTES", block_bytes)
    assert read(write(tmp_path, "a.txt", content.encode()), separator=separator) == expected


def test_an_empty_separator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--separator is empty"):
        read(write(tmp_path, "a.txt", b"text"), separator="")


# JSON


@pytest.mark.parametrize(
    "value",
    [["a", "b"], [{"text": "a"}, {"text": "b"}], {"data": [{"text": "a"}, "b"], "n": 2}, {"text": ["a", "b"]}],
)
def test_json_of_many_shapes(value: object, tmp_path: Path) -> None:
    assert read(write(tmp_path, "a.json", json.dumps(value).encode())) == ["a", "b"]
    assert read(write(tmp_path, "b.json", b"\xef\xbb\xbf" + json.dumps(value, indent=2).encode())) == ["a", "b"]


def test_json_that_is_one_record_or_lines_of_records(tmp_path: Path) -> None:
    assert read(write(tmp_path, "one.json", b'{"text": "a", "n": [1]}')) == ["a"]
    assert read(write(tmp_path, "lines.json", b'{"text": "a"}\n{"text": "b"}\n')) == ["a", "b"]
    assert read(write(tmp_path, "empty.json", b" \n")) == []
    assert read(write(tmp_path, "spread.json", b'{\n"text":\n"a"\n}\n')) == ["a"]
    with pytest.raises(UserError, match=r"bad\.json:2 is not JSON"):
        read(write(tmp_path, "bad.json", b'{"text": "a"}\n{"text": \n'))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', r"a\.jsonl:3 is not JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b", "n": 1}\n',
            r"a\.jsonl:2 has no field 'text'.*--text_field.*body, n",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1 has int in 'text'"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1 is neither a record nor a string"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl .*0xff at offset 24"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is not JSON"),
        ("a.json", b'[{"text": "a"},\n{"text": }]', r"a\.json:2 is not JSON"),
        ("a.json", b'["a", {"body": "b"}]', r"record 2 of .*a\.json has no field 'text'.*body"),
        ("a.json", b'{"n": 1}', r"a\.json has no field 'text'.*\(n\)"),
        ("a.json", b"3", r"a\.json has no records"),
        ("a.json", b'["\xff"]', r"a\.json .*0xff at offset 2"),
        ("a.csv", b"id,body\n1,a\n", r"a\.csv has no column 'text'.*--text_field.*id, body"),
        ("a.csv", b"id,text\n1,a\n2\n", r"a\.csv:3 has 1 of 2 columns"),
        ("a.csv", b"id,text\n1,\xff\n", r"a\.csv .*0xff at offset 10"),
        ("a.tsv", b"id\ttext\r1\ta\r", r"a\.tsv:.* is not valid"),
        ("a.parquet", b"PAR1 not", r"a\.parquet is not a valid Parquet file"),
        ("a.parquet", make_parquet(["a", "b"])[:-10], r"a\.parquet is not a valid Parquet file"),
        ("a.warc", b"no archive at all\n" * 30, r"a\.warc is not a valid WARC archive"),
        ("a.warc", make_answer("page")[:-40], r"a\.warc is truncated after 1 records"),
        ("a.wet", make_record("conversion", b"x\xff"), r"the record at offset 0 of .*a\.wet .*0xff at offset 1"),
    ],
)
def test_errors_are_reported_with_their_location(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, name, content))


def test_parquet_columns_must_be_text_and_be_there(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    file = SourceFile(str(tmp_path / "a.parquet"), "a.parquet", (tmp_path / "a.parquet").stat().st_size, 0)
    assert read(file, text_field="body") == ["a"]
    with pytest.raises(UserError, match=r"a\.parquet has no column 'text'.*body, n"):
        read(file)
    with pytest.raises(UserError, match=r"a\.parquet has int64 in 'n'"):
        read(file, text_field="n")


def test_half_a_character_in_json_can_still_be_encoded(tmp_path: Path) -> None:
    (text,) = read(write(tmp_path, "a.jsonl", rb'{"text": "a\ud800b \ud83d\ude42 \u00e9"}'))
    assert text == "a\ufffdb 🙂 é"
    assert read(write(tmp_path, "a.json", rb'["a\ud800b"]'))[0].encode() == "a\ufffdb".encode()


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2**20)
    with pytest.raises(UserError, match=r"a\.jsonl has a line of more than 1 MiB at offset 5"):
        read(write(tmp_path, "a.jsonl", b'"ab"\n"' + b"x" * 2**21))


def test_pages_are_read_in_the_encoding_that_they_declare(tmp_path: Path) -> None:
    page = '<html><head><meta charset="iso-8859-1"></head><body><p>Café, déjà vu</p></body></html>'
    assert read(write(tmp_path, "a.html", page.encode("latin-1"))) == ["Café, déjà vu"]


def make_chunks(content: bytes) -> bytes:
    pieces = [content[start : start + 40] for start in range(0, len(content), 40)]
    return b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ("Content-Type: Text/HTML", make_page("a page").encode()),
        ("Content-Type: text/html; charset=no-such", make_page("a page").encode("utf-8") + b"<!-- \xff -->"),
        ("Content-Type: text/html\r\nContent-Encoding: gzip", gzip.compress(make_page("a page").encode())),
        ("Content-Type: text/html\r\nContent-Encoding: gzip", make_page("a page").encode()),  # undone by the crawler
        ("Content-Type: text/html\r\nTransfer-Encoding: chunked", make_chunks(make_page("a page").encode())),
        ("Content-Type: text/html\r\nTransfer-Encoding: chunked", make_page("a page").encode()),
    ],
    ids=["upper case", "unknown charset", "gzip", "undone gzip", "chunked", "undone chunks"],
)
def test_pages_are_unpacked_as_they_were_sent(headers: str, content: bytes, tmp_path: Path) -> None:
    record = make_record("response", f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n".encode() + content)
    assert read(write(tmp_path, "a.warc", record)) == ["a page"]


def test_a_page_packed_in_an_unknown_way_is_left_out(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: br\r\n\r\n"
    packed = make_record("response", head + bytes(range(128, 256)))
    assert read(write(tmp_path, "a.warc", packed + make_answer("last"))) == ["last"]


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_table_that_ends_inside_quotes_is_refused(ending: str, tmp_path: Path) -> None:
    whole = f'id,text\n1,"one ""two"" \n lines"\n2,a 5" pipe{ending}'
    assert read(write(tmp_path, "a.csv", whole.encode())) == ['one "two" \n lines', 'a 5" pipe']
    torn = f'id,text\n1,one\n2,"two\n3,three{ending}'
    with pytest.raises(UserError, match=r"a\.csv ends inside quotes, which were opened in row 2"):
        read(write(tmp_path, "a.csv", torn.encode()))


def test_a_json_value_too_large_to_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.data.sources.formats.json_records.MAX_VALUE_BYTES", 50)
    with pytest.raises(UserError, match=r"too large to parse in memory.*jq"):
        read(write(tmp_path, "a.json", json.dumps([{"text": "x" * 100}]).encode()))


def test_records_larger_than_any_buffer_are_read_and_skipped(tmp_path: Path) -> None:
    large = "large words " * 30_000
    content = make_record("metadata", large.encode()) + make_answer(large) + make_answer(large, "image/png")
    file = write(tmp_path, "a.warc.gz", gzip.compress(content + make_answer("last")))
    assert read(file) == [large.strip(), "last"]


def test_documents_of_white_space_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n\t")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{"text": "  "}\n{"text": " x "}\n')
    source = resolve_source([str(tmp_path)], ReadingOptions())
    assert list(read_documents(source, ReadingOptions())) == [" x "]
