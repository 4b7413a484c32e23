"""HTML pages and Common Crawl archives (WARC, WET): the main text of each page."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.decoding import decode_record
from gptmill.data.sources.failures import ReadingError, Record, make_extra_error
from gptmill.data.sources.formats.html_text import extract_main_text
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
RECORD_END = b"\r\n\r\n"
SKIPPED_BYTES = 2**20
MAX_PAGE_BYTES = 2**26  # Common Crawl truncates pages at 2**20 to 5 * 2**20
CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})[^\r\n]{0,256}\r\n")


def read_html(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    """Reads one page as one document."""
    del options, part
    yield extract_text(_read_page(stored.open_data(), stored.uri), None)


def read_warc(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    """Reads the HTML pages among the recorded HTTP responses."""
    del options, part
    for record in _read_records(stored, "response"):
        if (record.http_content_type or "").lower() in HTML_TYPES:
            where = _locate(record, stored)
            try:
                content = _decode_payload(_read_page(record.reader, where), record.http_headers, where)
            except ReadingError as error:
                yield error
                continue
            if content is not None:
                yield extract_text(content, record.http_charset)


def read_wet(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[Record]:
    """Reads text that Common Crawl has already extracted."""
    del part
    for record in _read_records(stored, "conversion"):
        where = _locate(record, stored)
        try:
            content = _read_page(record.reader, where)
        except ReadingError as error:
            yield error
            continue
        yield from decode_record(content, where, 0, options)


def extract_text(content: bytes, charset: str | None) -> str:
    """Extracts the main text of a page, decoded by its declared or else by its detected encoding."""
    try:
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    except ImportError:
        raise make_extra_error("reading HTML", "data") from None
    try:
        page = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        page = bytes_to_str(content, _find_codec(charset) or detect_encoding(content, from_html_meta=True))
    return extract_main_text(page)


def _locate(record: Any, stored: StoredFile) -> str:
    return f"the record at offset {record.stream_pos} of {stored.uri}"


def _read_page(data: Any, where: str) -> bytes:
    content = bytes(data.read(MAX_PAGE_BYTES + 1))
    _check_length(content, where)
    return content


def _check_length(content: bytes, where: str) -> None:
    if len(content) > MAX_PAGE_BYTES:
        raise ReadingError(f"{where} is a page of more than {MAX_PAGE_BYTES >> 20} MiB; leave it out, or save its text")


def _decode_payload(content: bytes, headers: Any, where: str) -> bytes | None:
    """Undoes the transfer and content encodings of a response; returns None for an unsupported encoding.

    Common Crawl stores decoded pages, sometimes with the original headers; wget and warcio store them encoded.
    """
    if "chunked" in (headers.get("Transfer-Encoding") or "").lower() and CHUNK_HEAD.match(content):
        content = b"".join(_read_chunks(content))
    for coding in reversed((headers.get("Content-Encoding") or "").lower().replace(" ", "").split(",")):
        if coding in ("gzip", "x-gzip", "deflate"):
            for wbits in (47, -15):  # gzip or zlib, detected by the header; raw deflate
                with contextlib.suppress(zlib.error):
                    content = zlib.decompressobj(wbits=wbits).decompress(content, MAX_PAGE_BYTES + 1)
                    break
            _check_length(content, where)
        elif coding not in ("", "identity") and b"<" not in content[:1024]:
            return None
    return content


def _read_chunks(content: bytes) -> Iterator[bytes]:
    position = 0
    while (head := CHUNK_HEAD.match(content, position)) and (size := int(head[1], 16)):
        yield content[head.end() : head.end() + size]
        position = head.end() + size + 2


def _find_codec(charset: str | None) -> str | None:
    """Returns the declared encoding, or None if Python has no codec of that name."""
    try:
        b" ".decode(charset or "", errors="ignore")
    except (LookupError, ValueError):
        return None
    return charset


class TailTrackingStream:
    """The input of fastwarc, which accepts truncated archives silently. Keeps the last bytes read, to detect these."""

    def __init__(self, data: io.BufferedReader) -> None:
        self._data = data
        self._position = 0
        self.tail = b""

    def read(self, size: int = -1, /) -> bytes:
        block = self._data.read1(size)  # read() would lose what precedes damage
        self._position += len(block)
        self.tail = (self.tail + block)[-len(RECORD_END) :]
        return block

    def close(self) -> None:
        """Does nothing: StoredFile closes the file."""

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Seeks forward only, by reading: a compressed file is not seekable."""
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        while self._position < target and self.read(min(target - self._position, SKIPPED_BYTES)):
            pass
        return self._position


def _read_records(stored: StoredFile, kind: str) -> Iterator[Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by fastwarc's own classes on import
            from fastwarc.warc import ArchiveIterator, WarcRecordType
    except ImportError:
        raise make_extra_error("reading Common Crawl archives", "data") from None
    data = TailTrackingStream(stored.open_data())
    count = 0
    try:
        for record in ArchiveIterator(data, record_types=WarcRecordType.any_type, parse_http=True):
            count += 1
            if record.record_type == getattr(WarcRecordType, kind):
                yield record
    except OSError as error:
        raise ReadingError(f"{stored.uri} is not a valid WARC archive: {error}; copy or download it again") from None
    if data.tail and (count == 0 or data.tail != RECORD_END):
        raise ReadingError(f"{stored.uri} is truncated after {count} records; copy or download it again")
