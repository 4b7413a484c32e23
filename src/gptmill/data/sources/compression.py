"""Streaming decompression in bounded memory. Truncated or corrupt files are reported by name."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Protocol

from gptmill.config.errors import UserError
from gptmill.data.sources.expansion import ExpansionLimit
from gptmill.data.sources.failures import ReadingError, make_extra_error

BLOCK_BYTES = 2**14
CONTENT_BYTES = 2**20  # that a block is decompressed to at a time, whatever its compression ratio
LARGEST_WINDOW_LOG = 31
# The package zstandard cannot bound its output, so it is fed little at a time: 4 bytes may be a block of 128 KiB.
ZSTANDARD_BYTES = 2**9


class CompressedStream(Protocol):
    """The compressed bytes, from disk or from the network."""

    def read(self, size: int, /) -> bytes | None: ...


class Decompressor(Protocol):
    """Decompresses one member of a file: the interface of bz2, of lzma and of the standard library's zstd."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int) -> bytes: ...


class GzipDecompressor:
    """zlib, which hands back the input that it has not consumed."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, /, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


class ZstandardDecompressor:
    """The package zstandard; `max_length` is exceeded by what ZSTANDARD_BYTES can hold."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise make_extra_error("reading .zst files", "data") from None
        self._zstd = zstandard.ZstdDecompressor(max_window_size=2**LARGEST_WINDOW_LOG).decompressobj()
        self._waiting = memoryview(b"")

    @property
    def eof(self) -> bool:
        return self._zstd.eof

    @property
    def needs_input(self) -> bool:
        return not self._waiting

    @property
    def unused_data(self) -> bytes:
        return self._zstd.unused_data + self._waiting

    def decompress(self, data: bytes, /, max_length: int) -> bytes:
        if data:
            self._waiting = memoryview(bytes(self._waiting) + data)
        contents, length = [], 0
        while self._waiting and length < max_length and not self._zstd.eof:
            contents.append(self._zstd.decompress(self._waiting[:ZSTANDARD_BYTES]))
            self._waiting = self._waiting[ZSTANDARD_BYTES:]
            length += len(contents[-1])
        return b"".join(contents)


def _build_bz2() -> Decompressor:
    import bz2

    return bz2.BZ2Decompressor()


def _build_xz() -> Decompressor:
    import lzma

    return lzma.LZMADecompressor(memlimit=2**LARGEST_WINDOW_LOG)


def _build_zstd() -> Decompressor:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW_LOG})
    return ZstandardDecompressor()


COMPRESSIONS: dict[str, Callable[[], Decompressor]] = {
    ".gz": GzipDecompressor,
    ".bz2": _build_bz2,
    ".xz": _build_xz,
    ".zst": _build_zstd,
}


def split_compression(name: str) -> tuple[str, str | None]:
    """Splits a file name into the name without the compression suffix and that suffix, or None."""
    suffix = PurePath(name).suffix.lower()
    return (name[: -len(suffix)], suffix) if suffix in COMPRESSIONS else (name, None)


class DecompressedFile(io.RawIOBase):
    """The decompressed content of a file, all members concatenated."""

    def __init__(self, compressed: CompressedStream, suffix: str, uri: str, max_expansion: float | None) -> None:
        self._compressed = compressed
        self._suffix = suffix
        self._uri = uri
        self._limit = ExpansionLimit(uri, max_expansion)
        self._decompressor: Decompressor | None = None
        self._unused = b""
        self._ready = memoryview(b"")
        self._bytes_consumed = 0
        self._bytes_produced = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        while not self._ready:
            if not self._decompress_block():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress_block(self) -> bool:
        """Returns False at the end of the file."""
        block = b""
        if self._decompressor is None or self._decompressor.needs_input:
            block = self._read_block()
            if not block and self._decompressor is None:
                return False
            if not block:
                raise ReadingError(
                    f"{self._uri} is truncated: its {self._suffix[1:]} data is incomplete at byte "
                    f"{self._bytes_consumed:,}, the end of the file; copy or download it again"
                )
        if self._decompressor is None:
            block = block.lstrip(b"\0")  # padding between members, as tapes and xz allow
            if not block:
                return True
        content = self._decompress(block)
        self._bytes_produced += len(content)
        self._limit.check(self._bytes_produced, self._bytes_consumed)
        self._ready = memoryview(content)
        return True

    def _read_block(self) -> bytes:
        block, self._unused = self._unused, b""
        if not block:
            block = self._compressed.read(BLOCK_BYTES) or b""
            self._bytes_consumed += len(block)
        return block

    def _decompress(self, block: bytes) -> bytes:
        try:
            if self._decompressor is None:
                self._decompressor = COMPRESSIONS[self._suffix]()
            content = self._decompressor.decompress(block, CONTENT_BYTES)
        except UserError:
            raise
        except ImportError:
            raise UserError(
                f"this Python was built without support for {self._suffix}; decompress {self._uri} first"
            ) from None
        except Exception as error:  # each package raises its own type
            raise ReadingError(
                f"{self._uri} is not a valid {self._suffix[1:]} file: {error}, near byte {self._bytes_consumed:,}; "
                f"copy or download it again"
            ) from None
        if self._decompressor.eof:
            self._unused = self._decompressor.unused_data
            self._decompressor = None
        return content
