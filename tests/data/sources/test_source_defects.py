"""Bad input: what is skipped or replaced is reported in its place, and everything else is read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Defect, DefectReport, SourceFile, list_parts, open_documents, parts
from gptmill.data.sources.failures import ReadingError, make_reading_error

Mode = Literal["stop", "skip", "replace"]
Seen = list[str | tuple[str, str]]


def write(folder: Path, name: str, content: bytes) -> SourceFile:
    path = folder / name
    path.write_bytes(content)
    return SourceFile(str(path), name, len(content), 0)


def read(file: SourceFile, mode: Mode, **options: str) -> Seen:
    """Texts, and defects as (kind, message), in order."""
    with open_documents(file, ReadingOptions(on_error=mode, **options)) as stream:  # type: ignore[arg-type]
        return [item if isinstance(item, str) else (item.kind, item.message) for item in stream.items]


def drop_messages(seen: Seen) -> list[str]:
    return [item if isinstance(item, str) else f"<{item[0]}>" for item in seen]


def make_lines(*records: object) -> bytes:
    return b"".join(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n" for record in records)


LINES = make_lines({"text": "one"}, b"{broken\n", {"body": "x"}, {"text": 7}, b'{"text": "t\xffo"}\n', {"text": "end"})
TABLE = b'id,text\n1,one\n2\n3,"t\xff\no"\n4,end\n'


def make_parquet(texts: list[bytes]) -> bytes:
    """Strings that need not be UTF-8, as other programs write them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), pyarrow.array(texts).buffers())
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": column}), sink, row_group_size=2)
    return bytes(sink.getvalue())


def make_wet(texts: list[bytes]) -> list[bytes]:
    return [
        b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nWARC-Record-ID: <urn:uuid:%d>\r\n"
        b"WARC-Date: 2020-01-01T00:00:00Z\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n" % (number, len(text), text)
        for number, text in enumerate(texts)
    ]


BAD_BYTES: dict[str, tuple[Callable[[], bytes], list[str]]] = {
    "a.txt": (lambda: b"one#t\xffo#end", ["one", "t�o", "end"]),
    "a.py": (lambda: b"# coding: ascii\n#t\xffo#end", [" coding: ascii\n", "t�o", "end"]),
    "a.jsonl": (lambda: make_lines("one", b'"t\xffo"\n', "end"), ["one", "t�o", "end"]),
    "a.csv": (lambda: b'text\none\n"t\xffo"\nend\n', ["one", "t�o", "end"]),
    "a.parquet": (lambda: make_parquet([b"one", b"t\xffo", b"end"]), ["one", "t�o", "end"]),
    "a.wet": (lambda: b"".join(make_wet([b"one", b"t\xffo", b"end"])), ["one", "t�o", "end"]),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_a_document_with_undecodable_bytes_is_skipped_or_replaced(name: str, tmp_path: Path) -> None:
    make, texts = BAD_BYTES[name]
    file = write(tmp_path, name, make())
    with pytest.raises(UserError, match=r"(?s)0xff at offset \d+; convert.*iconv -f ENCODING.*--on_error skip"):
        read(file, "stop", separator="#")
    assert drop_messages(read(file, "skip", separator="#")) == [texts[0], "<undecodable>", texts[2]]
    assert drop_messages(read(file, "replace", separator="#")) == [texts[0], "<replaced>", *texts[1:]]


def test_long_text_loses_only_the_piece_with_the_bad_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.data.sources.cutting.MAX_DOCUMENT_CHARS", 100)
    file = write(tmp_path, "a.txt", b"word " * 30 + b"\xe9 " + b"word " * 30)
    seen = read(file, "skip")
    assert [item for item in seen if not isinstance(item, str)] == [
        ("undecodable", "document 2 of a.txt is not utf-8 text: byte 0xe9 at offset 51")
    ]
    assert len(seen) == 4
    text = "".join(item for item in read(file, "replace") if isinstance(item, str))
    assert text == "word " * 30 + "� " + "word " * 30


def test_a_bad_line_is_skipped_with_its_number(tmp_path: Path) -> None:
    assert read(write(tmp_path, "a.jsonl", LINES), "skip") == [
        "one",
        (
            "malformed",
            "a.jsonl:2 is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("no_text", "a.jsonl:3 has no field 'text'"),
        ("no_text", "a.jsonl:4 has int in 'text', not text"),
        ("undecodable", "a.jsonl is not utf-8 text: byte 0xff at offset 61"),
        "end",
    ]
    for number in range(1, 5):  # each of them stops the reading otherwise
        line = LINES.splitlines(keepends=True)[number]
        with pytest.raises(ReadingError):
            read(write(tmp_path, "b.jsonl", line), "stop")


def test_the_parts_of_a_file_report_the_same_defects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "a.jsonl", LINES * 20)
    whole = drop_messages(read(file, "skip"))
    monkeypatch.setattr(parts, "SMALL_FILE_BYTES", 100)
    monkeypatch.setattr(parts, "PART_BYTES", 150)
    options = ReadingOptions(on_error="skip")
    found = list_parts(file, options)
    assert found is not None
    seen = []
    for part in found:
        with open_documents(file, options, part) as stream:
            seen += [item if isinstance(item, str) else f"<{item.kind}>" for item in stream.items]
            assert stream.bytes_read == part.size_bytes
    assert seen == whole


def test_a_bad_row_is_skipped_and_a_row_of_several_lines_is_one(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", TABLE)
    assert read(file, "skip") == [
        "one",
        ("malformed", "a.csv:3 has 1 of 2 columns, none of them 'text'"),
        ("undecodable", "a.csv:5 is not utf-8 text: byte 0xff at offset 1"),
        "end",
    ]
    assert drop_messages(read(file, "replace")) == ["one", "<malformed>", "<replaced>", "t�\no", "end"]
    open_quote = write(tmp_path, "b.csv", b'text\none\n"two\nthree\n')
    assert drop_messages(read(open_quote, "skip")) == ["one", "<damaged>"]


def test_json_skips_a_record_or_the_file(tmp_path: Path) -> None:
    records = write(tmp_path, "a.json", b'[{"text": "one"}, 5, {"text": "end"}]')
    assert drop_messages(read(records, "skip")) == ["one", "<malformed>", "end"]
    assert drop_messages(read(write(tmp_path, "b.json", b'[{"text": "one"'), "skip")) == ["<malformed>"]
    assert drop_messages(read(write(tmp_path, "c.json", b'["t\xffo"]'), "replace")) == ["<replaced>", "t�o"]


def test_a_parquet_file_loses_only_damaged_row_groups(tmp_path: Path) -> None:
    content = bytearray(make_parquet([f"{number} {'x' * 400}".encode() for number in range(6)]))
    third = content.index(b"2 xx")
    content[third - 60 : third + 8] = b"\xff" * 68  # the header of the page
    seen = read(write(tmp_path, "a.parquet", bytes(content)), "skip")
    assert [text[0] for text in seen if isinstance(text, str)] == ["0", "1", "4", "5"]
    assert drop_messages(seen)[2] == "<damaged>"
    assert drop_messages(read(write(tmp_path, "b.parquet", bytes(content[:900])), "skip")) == ["<damaged>"]


def test_a_large_parquet_file_without_its_end_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SMALL_FILE_BYTES", 100)
    file = write(tmp_path, "a.parquet", make_parquet([b"x" * 500])[:400])
    assert list_parts(file, ReadingOptions(on_error="skip")) is None
    assert drop_messages(read(file, "skip")) == ["<damaged>"]


def test_a_truncated_compressed_file_gives_what_precedes_the_damage(tmp_path: Path) -> None:
    texts = [f"{number**7} " * 9 for number in range(5000)]
    packed = gzip.compress(make_lines(*texts))
    seen = read(write(tmp_path, "a.jsonl.gz", packed[: len(packed) // 2]), "skip")
    assert 1000 < len(seen) - 1 < 4000
    assert seen[:-1] == texts[: len(seen) - 1]
    assert seen[-1][0] == "damaged"
    packed = gzip.compress("#".join(texts).encode())
    seen = read(write(tmp_path, "b.txt.gz", packed[: len(packed) // 2]), "skip", separator="#")
    assert 1000 < len(seen) - 1 < 4000
    assert seen[:-1] == texts[: len(seen) - 1]
    assert drop_messages(read(write(tmp_path, "c.txt.gz", b"no gzip"), "skip")) == ["<damaged>"]


@pytest.mark.parametrize("name", ["a.wet", "a.wet.gz"])
def test_a_truncated_archive_gives_its_whole_records(name: str, tmp_path: Path) -> None:
    pytest.importorskip("fastwarc")
    records = make_wet([f"page {number}".encode() for number in range(20)])
    content = b"".join(gzip.compress(record) if name.endswith(".gz") else record for record in records)
    seen = drop_messages(read(write(tmp_path, name, content[:-30]), "skip"))
    assert seen[:19] == [f"page {number}" for number in range(19)]
    assert seen[-1] == "<damaged>"


def test_only_lasting_errors_of_a_file_are_skipped() -> None:
    """A full disk or the network would make the result depend on the moment."""
    assert isinstance(make_reading_error("a", PermissionError(13, "no")), ReadingError)
    assert isinstance(make_reading_error("a", OSError(5, "input/output error")), ReadingError)
    assert not isinstance(make_reading_error("a", OSError(28, "no space")), ReadingError)


def test_empty_files_and_documents_are_named(tmp_path: Path) -> None:
    assert read(write(tmp_path, "a.txt", b""), "stop") == [("empty_file", "a.txt")]
    assert read(write(tmp_path, "b.txt", b" \n\t"), "stop") == [("empty_document", "b.txt")]
    lines = write(tmp_path, "c.jsonl", make_lines({"text": ""}, "one", {"text": None}, b"\n", {"text": " "}))
    assert drop_messages(read(lines, "stop")) == ["<empty_document>", "one", "<empty_document>", "<empty_document>"]
    separated = write(tmp_path, "d.txt", b"one# #two#\n")
    assert drop_messages(read(separated, "stop", separator="#")) == ["one", "<empty_document>", "two"]
    with open_documents(lines, ReadingOptions()) as documents:
        assert list(documents) == ["one"]


def test_a_report_counts_by_kind_survives_json_and_keeps_a_few_examples() -> None:
    report = DefectReport()
    for number in range(5):
        report.add(Defect("malformed", f"a.jsonl:{number} is\n\x1bnot JSON"))
        report.add(Defect("empty_file", f"{number}.txt"))
    assert report.num_errors == 5
    assert DefectReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert report.describe() == [
        "5 empty files: 0.txt, 1.txt, 2.txt, ...",
        "skipped 5 malformed record(s); among them:",
        *(f"  a.jsonl:{number} is \\x1bnot JSON" for number in range(3)),
    ]
    report.check_limit(5)
    with pytest.raises(UserError, match=r"more than 4 errors.*--max_errors"):
        report.check_limit(4)
