"""Streaming decompression in bounded memory. Truncated or corrupt files are reported by name."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Protocol

from gptmill.config.errors import UserError
from gptmill.data.sources.failures import ReadingError, make_extra_error

# Small, so that even a block with an extreme compression ratio decompresses to a bounded amount of memory.
BLOCK_BYTES = 2**14
LARGEST_WINDOW_LOG = 31


class CompressedStream(Protocol):
    """The compressed bytes, from disk or from the network."""

    def read(self, size: int, /) -> bytes | None: ...


class Decompressor(Protocol):
    """The interface that zlib, bz2, lzma and both zstd packages share; decompresses one member of a file."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _build_gzip() -> Decompressor:
    return zlib.decompressobj(wbits=31)


def _build_bz2() -> Decompressor:
    import bz2

    return bz2.BZ2Decompressor()


def _build_xz() -> Decompressor:
    import lzma

    return lzma.LZMADecompressor()


def _build_zstd() -> Decompressor:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW_LOG})
    try:
        import zstandard
    except ImportError:
        raise make_extra_error("reading .zst files", "data") from None
    return zstandard.ZstdDecompressor(max_window_size=2**LARGEST_WINDOW_LOG).decompressobj()


COMPRESSIONS: dict[str, Callable[[], Decompressor]] = {
    ".gz": _build_gzip,
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

    def __init__(self, compressed: CompressedStream, suffix: str, uri: str) -> None:
        self._compressed = compressed
        self._suffix = suffix
        self._uri = uri
        self._decompressor: Decompressor | None = None
        self._unused = b""
        self._ready = memoryview(b"")
        self._bytes_consumed = 0

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
        block = self._unused
        if not block:
            block = self._compressed.read(BLOCK_BYTES) or b""
            self._bytes_consumed += len(block)
        self._unused = b""
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
        self._ready = memoryview(self._decompress(block))
        return True

    def _decompress(self, block: bytes) -> bytes:
        try:
            if self._decompressor is None:
                self._decompressor = COMPRESSIONS[self._suffix]()
            content = self._decompressor.decompress(block)
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
