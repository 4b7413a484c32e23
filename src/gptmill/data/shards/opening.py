"""TokenShards: a corpus of tokens, opened. Memory maps only; nothing is read until a window is asked for."""

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

AGAIN = "prepare the corpus again with --overwrite"
# Of opening a folder whose files have to be hashed: bytes done, bytes in all.
HashReport = Callable[[int, int], None]


@dataclass(frozen=True)
class SplitWindows:
    """A split cut into windows of `context_length` tokens, each with the token that follows it."""

    arrays: Sequence[TokenArray]
    context_length: int

    @cached_property
    def lengths(self) -> IndexArray:
        """Tokens in each shard, without opening any that is not open yet."""
        if isinstance(self.arrays, LazyArrays):
            return self.arrays.lengths
        return np.array([len(array) for array in self.arrays], dtype=np.int64)

    @cached_property
    def counts(self) -> IndexArray:
        """Windows in each shard; a last piece shorter than a window is left over."""
        return np.maximum(0, (self.lengths - 1) // self.context_length)

    @cached_property
    def num_windows(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _ends(self) -> IndexArray:
        return np.cumsum(self.counts)

    def locate(self, windows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """The shard of each window, and the place in it of the window's first token."""
        shards = np.searchsorted(self._ends, windows, side="right")
        return shards, (windows - (self._ends - self.counts)[shards]) * self.context_length


@dataclass(frozen=True)
class TokenShards:
    """Manifest, arrays and tokenizer of one corpus.

    `address` is what the user named. `folder` is where its files are on this machine: the same place, or for a corpus
    from afar its cache. `train_starts` and `val_starts` have the places in each shard at which documents start.
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


def holds_shards(place: Path | str) -> bool:
    """Whether a place can be opened as it is: prepared here, by another project, or far away."""
    return is_remote(place) or (Path(place) / MANIFEST_NAME).exists() or bool(find_external_files(Path(place)))


def open_shards(
    place: Path | str,
    expected_tokenizer: str | None = None,
    *,
    report: HashReport | None = None,
    cache_dir: Path | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> TokenShards:
    """Opens a corpus, refusing one that is incomplete, changed, or made with another tokenizer.

    An address such as s3://bucket/corpus is read through a cache in `cache_dir` of at most `cache_bytes`. `report` is
    told of bytes done and in all where files have to be hashed.
    """
    if is_remote(place):
        remote = open_remote(place, cache_dir, cache_bytes)
        tokenizer = restore_expected_tokenizer(remote.manifest, remote.uri, expected_tokenizer)
        return TokenShards(remote.uri, remote.folder, remote.manifest, tokenizer, **remote.arrays)
    folder = Path(place)
    if not (folder / MANIFEST_NAME).exists() and find_external_files(folder):
        foreign = open_external(folder, expected_tokenizer)
        scanned = {
            f"{name}_starts": ScannedStarts(arrays, foreign.tokenizer.end_of_text)
            for name, arrays in foreign.arrays.items()
        }
        return TokenShards(str(place), folder, foreign.manifest, foreign.tokenizer, **foreign.arrays, **scanned)
    manifest = read_manifest(folder)
    tokenizer = restore_expected_tokenizer(manifest, str(folder), expected_tokenizer)
    own = _open_own(folder, manifest)
    _check_unchanged(folder, manifest, report)
    return TokenShards(str(place), folder, manifest, tokenizer, **own)


def restore_expected_tokenizer(manifest: Manifest, place: str, expected_name: str | None) -> Tokenizer:
    """Raises UserError where it is another than the run asks for, or no longer the one that made the tokens."""
    tokenizer = restore_tokenizer(manifest.tokenizer, f"{place}/{MANIFEST_NAME}")
    if expected_name is not None and not is_called(tokenizer, expected_name):
        raise UserError(
            f"tokenizer mismatch: the run asks for {expected_name}, but {place} was prepared with "
            f"{manifest.fingerprint}; prepare it with --tokenizer {expected_name}, or leave --tokenizer out"
        )
    check_fingerprint(manifest.fingerprint, make_fingerprint(tokenizer), f"corpus {place}")
    return tokenizer


def _open_own(folder: Path, manifest: Manifest) -> dict[str, MappedArrays]:
    pool, dtype, places = MapPool(), np.dtype(manifest.dtype), np.dtype(np.int64)
    arrays: dict[str, MappedArrays] = {}
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        tokens = [find_shard(folder / shard.file, dtype, shard.tokens) for shard in split.shards]
        documents = folder / DOCUMENTS_DIR
        starts = [find_shard(documents / shard.file, places, shard.documents) for shard in split.shards]
        arrays |= {name: MappedArrays(tokens, pool), f"{name}_starts": MappedArrays(starts, pool)}
    return arrays


def find_shard(path: Path, dtype: np.dtype[Any], length: int) -> StoredArray:
    """A file of a prepared corpus. Raises UserError unless it is what the manifest says."""
    try:
        stored = find_array(path)
    except OSError as error:
        raise UserError(f"cannot read shard {path}: {error.strerror or error}; {AGAIN}") from None
    except ValueError as error:
        raise UserError(f"shard {path} is damaged ({error}); {AGAIN}") from None
    if stored.length != length or stored.dtype != dtype:
        found = f"{stored.dtype} ({stored.length},)"
        raise UserError(f"shard {path} holds {found}, the manifest says {dtype} ({length},); {AGAIN}")
    return stored


def list_checksums(folder: Path, split: Split) -> dict[Path, str]:
    """The SHA-256 that the manifest gives for each file of a split."""
    tokens = {folder / shard.file: shard.sha256 for shard in split.shards}
    return tokens | {folder / DOCUMENTS_DIR / shard.file: shard.documents_sha256 for shard in split.shards}


def _check_unchanged(folder: Path, manifest: Manifest, report: HashReport | None) -> None:
    """The manifest was written last, so a file that is not older than it may have changed, and is hashed."""
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
                raise UserError(
                    f"shard {path} changed after it was prepared; see what else did with gptmill data verify {folder}, "
                    f"and {AGAIN}"
                )
            done += size
            if report:
                report(done, total)
    with suppress(OSError):  # somebody else's folder; then they are hashed every time
        os.utime(folder / MANIFEST_NAME, ns=(now, now))
