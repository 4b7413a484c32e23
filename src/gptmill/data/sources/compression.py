"""Compressed files as plain streams. One that is cut off or damaged is named; none is unpacked whole."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Protocol

from gptmill.config.errors import UserError
from gptmill.data.sources.failures import make_extra_error

# Small, so that even the densest data unpacks to a bounded piece of memory.
BLOCK_BYTES = 2**14
LARGEST_WINDOW_LOG = 31


class Stored(Protocol):
    """What is unpacked: bytes as they lie on the disk or come from the network."""

    def read(self, size: int, /) -> bytes | None: ...


class Decompressor(Protocol):
    """What zlib, bz2, lzma and both zstd packages offer, for one member of a file."""

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
    """A file's name without the suffix of its compression, and that suffix."""
    suffix = PurePath(name).suffix.lower()
    return (name[: -len(suffix)], suffix) if suffix in COMPRESSIONS else (name, None)


class UnpackedFile(io.RawIOBase):
    """The content of a compressed file, member after member, as it would be without the compression."""

    def __init__(self, stored: Stored, suffix: str, address: str) -> None:
        self._stored = stored
        self._suffix = suffix
        self._address = address
        self._decompressor: Decompressor | None = None
        self._unused = b""
        self._ready = memoryview(b"")
        self._bytes_taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        while not self._ready:
            if not self._unpack_block():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack_block(self) -> bool:
        block = self._unused
        if not block:
            block = self._stored.read(BLOCK_BYTES) or b""
            self._bytes_taken += len(block)
        self._unused = b""
        if not block and self._decompressor is None:
            return False
        if not block:
            raise UserError(
                f"{self._address} is cut off: its {self._suffix[1:]} data goes on after byte {self._bytes_taken:,}, "
                f"the last; copy or download it again"
            )
        if self._decompressor is None:
            block = block.lstrip(b"\0")  # padding between members, which tapes and xz allow
            if not block:
                return True
        self._ready = memoryview(self._decompress(block))
        return True

    def _decompress(self, block: bytes) -> bytes:
        try:
            if self._decompressor is None:
                self._decompressor = COMPRESSIONS[self._suffix]()
            unpacked = self._decompressor.decompress(block)
        except UserError:
            raise
        except ImportError:
            raise UserError(f"this Python was built without {self._suffix}; unpack {self._address} first") from None
        except Exception as error:  # each package has its own kind
            raise UserError(
                f"{self._address} is no sound {self._suffix[1:]} file: {error}, near byte {self._bytes_taken:,}; "
                f"copy or download it again"
            ) from None
        if self._decompressor.eof:
            self._unused = self._decompressor.unused_data
            self._decompressor = None
        return unpacked
