"""What a corpus is before anything of it is read. Small and frozen: it travels to other processes."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

HUB_PREFIX = "hf:"


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus, wherever it is."""

    address: str
    name: str  # inside the place that it was found in
    size_bytes: int  # as stored, so compressed where it is; 0 where unknown
    changed_ns: int

    @property
    def is_on_hub(self) -> bool:
        return self.address.startswith(HUB_PREFIX) and not self.is_remote

    @property
    def is_remote(self) -> bool:
        return is_url(self.address)

    @property
    def path_name(self) -> str:
        """The address as far as suffixes go: without the query of a URL."""
        return urlsplit(self.address).path if self.is_remote else self.address


@dataclass(frozen=True)
class Part:
    """A range of one file that can be read by itself: of bytes, or of a parquet file's row groups."""

    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True)
class Source:
    """The files of a corpus in a fixed order."""

    name: str
    files: tuple[SourceFile, ...]
    size_bytes: int
    listing_sha256: str
    one_document_per_file: bool


def is_url(place: str) -> bool:
    return "://" in place
