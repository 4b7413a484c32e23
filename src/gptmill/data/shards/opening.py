"""TokenShards: an opened corpus of tokens. Shards are memory-mapped; nothing is read until a window is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gptmill.config.errors import UserError
from gptmill.data.files import hash_file
from gptmill.data.remote_fs import is_remote
from gptmill.data.shards.arrays import (
    IndexArray,
    LazyArrays,
    MappedArrays,
    MapPool,
    ScannedStarts,
    StoredArray,
    find_array,
)
from gptmill.data.shards.external_formats import find_external_files, open_external
from gptmill.data.shards.remote_shards import CACHE_BYTES, open_remote
from gptmill.data.shards.shard_manifest import DOCUMENTS_DIR, Manifest, Split, read_manifest
from gptmill.data.shards.shard_manifest import FILE_NAME as MANIFEST_NAME
from gptmill.data.tokenizers import Tokenizer, is_called, restore_tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, check_fingerprint, make_fingerprint

PREPARE_AGAIN = "prepare the corpus again with --overwrite"
# Called with (bytes hashed, bytes in total) when opening a folder has to hash files.
HashReport = Callable[[int, int], None]


@dataclass(frozen=True)
class SplitWindows:
    """A split divided into windows of `context_length` tokens, each followed by one more token as its last target."""

    arrays: Sequence[TokenArray]
    context_length: int

    @cached_property
    def lengths(self) -> IndexArray:
        """Tokens in each shard; known without opening it."""
        if isinstance(self.arrays, LazyArrays):
            return self.arrays.lengths
        return np.array([len(array) for array in self.arrays], dtype=np.int64)

    @cached_property
    def counts(self) -> IndexArray:
        """Windows in each shard; the remainder shorter than a window is unused."""
        return np.maximum(0, (self.lengths - 1) // self.context_length)

    @cached_property
    def num_windows(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _ends(self) -> IndexArray:
        return np.cumsum(self.counts)

    def locate(self, windows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Returns the shard of each window, and the position of the window's first token in it."""
        shards = np.searchsorted(self._ends, windows, side="right")
        return shards, (windows - (self._ends - self.counts)[shards]) * self.context_length


@dataclass(frozen=True)
class TokenShards:
    """Manifest, arrays and tokenizer of one corpus.

    `location` is the folder or URI that the user gave, `folder` that folder or the local cache of the URI.
    `train_starts` and `val_starts` hold the positions in each shard where documents start.
    """

    location: str
    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: Sequence[TokenArray]
    val: Sequence[TokenArray]
    train_starts: Sequence[IndexArray]
    val_starts: Sequence[IndexArray]

    def cut(self, arrays: Sequence[TokenArray], context_length: int) -> SplitWindows:
        return SplitWindows(arrays, context_length)


def holds_shards(location: Path | str) -> bool:
    """Whether a location can be opened as it is: a prepared corpus, an external format, or a URI."""
    folder = Path(location)
    return is_remote(location) or (folder / MANIFEST_NAME).exists() or bool(find_external_files(folder))


def open_shards(
    location: Path | str,
    expected_tokenizer: str | None = None,
    *,
    report: HashReport | None = None,
    cache_dir: Path | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> TokenShards:
    """Opens a corpus; raises UserError if it is incomplete, changed, or made with another tokenizer.

    A URI such as s3://bucket/corpus is read through a local cache of at most `cache_bytes` in `cache_dir`.
    """
    if is_remote(location):
        remote = open_remote(location, cache_dir, cache_bytes)
        tokenizer = restore_expected_tokenizer(remote.manifest, remote.uri, expected_tokenizer)
        return TokenShards(remote.uri, remote.folder, remote.manifest, tokenizer, **remote.arrays)
    folder = Path(location)
    if not (folder / MANIFEST_NAME).exists() and find_external_files(folder):
        external = open_external(folder, expected_tokenizer)
        scanned = {
            f"{name}_starts": ScannedStarts(arrays, external.tokenizer.end_of_text)
            for name, arrays in external.arrays.items()
        }
        return TokenShards(str(location), folder, external.manifest, external.tokenizer, **external.arrays, **scanned)
    manifest = read_manifest(folder)
    tokenizer = restore_expected_tokenizer(manifest, str(folder), expected_tokenizer)
    arrays = _map_shards(folder, manifest)
    _check_unchanged(folder, manifest, report)
    return TokenShards(str(location), folder, manifest, tokenizer, **arrays)


def restore_expected_tokenizer(manifest: Manifest, location: str, expected_name: str | None) -> Tokenizer:
    """Restores a corpus's tokenizer; raises UserError if it is not the expected one, or behaves differently now."""
    tokenizer = restore_tokenizer(manifest.tokenizer, f"{location}/{MANIFEST_NAME}")
    if expected_name is not None and not is_called(tokenizer, expected_name):
        raise UserError(
            f"tokenizer mismatch: the run asks for {expected_name}, but {location} was prepared with "
            f"{manifest.fingerprint}; prepare it with --tokenizer {expected_name}, or leave --tokenizer out"
        )
    check_fingerprint(manifest.fingerprint, make_fingerprint(tokenizer), f"corpus {location}")
    return tokenizer


def _map_shards(folder: Path, manifest: Manifest) -> dict[str, MappedArrays]:
    pool, dtype, starts_dtype = MapPool(), np.dtype(manifest.dtype), np.dtype(np.int64)
    arrays: dict[str, MappedArrays] = {}
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        tokens = [find_shard(folder / shard.file, dtype, shard.tokens) for shard in split.shards]
        documents = folder / DOCUMENTS_DIR
        starts = [find_shard(documents / shard.file, starts_dtype, shard.documents) for shard in split.shards]
        arrays |= {name: MappedArrays(tokens, pool), f"{name}_starts": MappedArrays(starts, pool)}
    return arrays


def find_shard(path: Path, dtype: np.dtype[Any], length: int) -> StoredArray:
    """Locates an array of a prepared corpus; raises UserError unless it is as the manifest says."""
    try:
        stored = find_array(path)
    except OSError as error:
        raise UserError(f"cannot read shard {path}: {error.strerror or error}; {PREPARE_AGAIN}") from None
    except ValueError as error:
        raise UserError(f"shard {path} is damaged ({error}); {PREPARE_AGAIN}") from None
    if stored.length != length or stored.dtype != dtype:
        found = f"{stored.dtype} ({stored.length},)"
        raise UserError(f"shard {path} holds {found}, the manifest says {dtype} ({length},); {PREPARE_AGAIN}")
    return stored


def list_checksums(folder: Path, split: Split) -> dict[Path, str]:
    """Returns the SHA-256 of each file of a split, as the manifest gives it."""
    tokens = {folder / shard.file: shard.sha256 for shard in split.shards}
    return tokens | {folder / DOCUMENTS_DIR / shard.file: shard.documents_sha256 for shard in split.shards}


def describe_change(folder: Path, path: Path) -> UserError:
    """Returns the error for a file that differs from its checksum in the manifest."""
    return UserError(
        f"shard {path} changed after it was prepared; check the others with gptmill data verify {folder}, and "
        f"{PREPARE_AGAIN}"
    )


def _check_unchanged(folder: Path, manifest: Manifest, report: HashReport | None) -> None:
    """Verifies files that are not older than the manifest: it was written last, so they may have changed since."""
    written = (folder / MANIFEST_NAME).stat().st_mtime_ns
    checksums = list_checksums(folder, manifest.train) | list_checksums(folder, manifest.val)
    sizes = {path: status.st_size for path in checksums if (status := path.stat()).st_mtime_ns >= written}
    if not sizes:
        return
    now, done, total = time.time_ns(), 0, sum(sizes.values())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for (path, size), sha256 in zip(sizes.items(), pool.map(hash_file, sizes), strict=True):
            if sha256 != checksums[path]:
                pool.shutdown(wait=False, cancel_futures=True)
                raise describe_change(folder, path)
            done += size
            if report:
                report(done, total)
    with suppress(OSError):  # a read-only folder: hashed each time it is opened
        os.utime(folder / MANIFEST_NAME, ns=(now, now))
