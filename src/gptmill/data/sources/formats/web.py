"""Web pages and Common Crawl's archives of them: the text that a reader of the page would read."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.failures import make_decoding_error, make_extra_error
from gptmill.data.sources.source import Part
from gptmill.data.sources.stored_file import StoredFile

HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
RECORD_END = b"\r\n\r\n"
SKIPPED_BYTES = 2**20
CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})[^\r\n]{0,256}\r\n")


def read_html(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    """One page, one document."""
    del options, part
    yield extract_text(stored.open_data().read(), None)


def read_warc(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    """The pages among the answers that a crawl recorded."""
    del options, part
    for record in _read_records(stored, "response"):
        if (record.http_content_type or "").lower() in HTML_TYPES:
            content = _unpack_payload(record.reader.read(), record.http_headers)
            if content is not None:
                yield extract_text(content, record.http_charset)


def read_wet(stored: StoredFile, options: ReadingOptions, part: Part | None = None) -> Iterator[str]:
    """Text that was extracted from a crawl already."""
    del options, part
    for record in _read_records(stored, "conversion"):
        content = record.reader.read()
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"the record at offset {record.stream_pos} of {stored.address}"
            raise make_decoding_error(where, error, error.start) from None


def extract_text(content: bytes, charset: str | None) -> str:
    """The main text of a page in the encoding that it declares or, failing that, seems to have."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    except ImportError:
        raise make_extra_error("reading HTML", "data") from None
    try:
        page = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        page = bytes_to_str(content, _find_codec(charset) or detect_encoding(content, from_html_meta=True))
    return str(extract_plain_text(page, main_content=True, links=False))


def _unpack_payload(content: bytes, headers: Any) -> bytes | None:
    """The page as it was before it was sent. Common Crawl unpacks pages itself, wget and warcio do not; some headers
    tell of a packing that was undone. None where it is packed in a way that cannot be undone here."""
    if "chunked" in (headers.get("Transfer-Encoding") or "").lower() and CHUNK_HEAD.match(content):
        content = b"".join(_read_chunks(content))
    for coding in reversed((headers.get("Content-Encoding") or "").lower().replace(" ", "").split(",")):
        if coding in ("gzip", "x-gzip", "deflate"):
            for wbits in (47, -15):  # gzip or zlib by its header; deflate without one
                with contextlib.suppress(zlib.error):
                    content = zlib.decompressobj(wbits=wbits).decompress(content)
                    break
        elif coding not in ("", "identity") and b"<" not in content[:1024]:
            return None
    return content


def _read_chunks(content: bytes) -> Iterator[bytes]:
    place = 0
    while (head := CHUNK_HEAD.match(content, place)) and (size := int(head[1], 16)):
        yield content[head.end() : head.end() + size]
        place = head.end() + size + 2


def _find_codec(charset: str | None) -> str | None:
    """The encoding that a server declared, unless there is none of that name."""
    try:
        b" ".decode(charset or "", errors="ignore")
    except (LookupError, ValueError):
        return None
    return charset


class WatchedStream:
    """What fastwarc reads. It takes an archive that is cut off for a whole one, so this remembers how it ended."""

    def __init__(self, data: io.BufferedReader) -> None:
        self._data = data
        self._position = 0
        self.end = b""

    def read(self, size: int = -1, /) -> bytes:
        block = self._data.read(size)
        self._position += len(block)
        self.end = (self.end + block)[-len(RECORD_END) :]
        return block

    def close(self) -> None:
        """The file is closed by who opened it."""

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Forwards only, which is all that a compressed file can do."""
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        while self._position < target and self.read(min(target - self._position, SKIPPED_BYTES)):
            pass
        return self._position


def _read_records(stored: StoredFile, kind: str) -> Iterator[Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fastwarc's own, of its own old classes
            from fastwarc.warc import ArchiveIterator, WarcRecordType
    except ImportError:
        raise make_extra_error("reading Common Crawl archives", "data") from None
    data = WatchedStream(stored.open_data())
    count = 0
    try:
        for record in ArchiveIterator(data, record_types=WarcRecordType.any_type, parse_http=True):
            count += 1
            if record.record_type == getattr(WarcRecordType, kind):
                yield record
    except OSError as error:
        raise UserError(f"{stored.address} is no sound WARC archive: {error}; copy or download it again") from None
    if data.end and (count == 0 or data.end != RECORD_END):
        raise UserError(f"{stored.address} is cut off after {count} records; copy or download it again")
