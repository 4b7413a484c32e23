"""What a corpus consists of, before anything is read. Small and frozen, so that worker processes can receive it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from urllib.parse import urlsplit

from gptmill.config.requests import ReadingOptions
from gptmill.data.remote_fs import is_remote

HUB_PREFIX = "hf:"

SOURCES: dict[str, Callable[[str, ReadingOptions], Generator[str]]] = {}
"""Registered sources by the name before the colon, as in NAME:REST; each yields the documents of REST."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus: local, remote, or a dataset of the Hugging Face Hub."""

    uri: str  # a path, a remote URI or hf:DATASET
    name: str  # relative to the folder or pattern that it was found by
    size_bytes: int  # as stored, that is compressed where it is; 0 if unknown
    mtime_ns: int  # 0 if unknown

    @property
    def is_on_hub(self) -> bool:
        return is_on_hub(self.uri)

    @property
    def is_streamed(self) -> bool:
        """Whether it is no file but a stream of documents: of the Hub, or of a registered source."""
        return self.is_on_hub or find_own_source(self.uri) is not None

    @property
    def is_remote(self) -> bool:
        return is_remote(self.uri) and not self.is_on_hub

    @property
    def path_name(self) -> str:
        """The part of the URI that carries the suffixes: without the query of a URL."""
        return urlsplit(self.uri).path if self.is_remote else self.uri


@dataclass(frozen=True)
class Part:
    """A range of one file that can be read independently: of bytes, or of row groups in a Parquet file."""

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


def is_on_hub(name: str) -> bool:
    """Whether a name is hf:DATASET, and not hf://…, which fsspec reads."""
    return name.startswith(HUB_PREFIX) and not name.startswith(f"{HUB_PREFIX}//")


def find_own_source(uri: str) -> str | None:
    """The name of the registered source that a URI begins with."""
    name = uri.partition(":")[0]
    return name if name in SOURCES and uri.startswith(f"{name}:") else None
