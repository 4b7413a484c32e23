"""Remote shards: any fsspec URI, read through a bounded local cache, each shard verified before use."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.files import find_cache_dir
from gptmill.data.shards.arrays import IndexArray, LazyArrays
from gptmill.data.shards.remote_folder import RemoteFolder
from gptmill.data.shards.shard_cache import RemoteFile, ShardCache
from gptmill.data.shards.shard_manifest import DOCUMENTS_DIR, Manifest, Split, read_manifest
from gptmill.data.shards.shard_manifest import FILE_NAME as MANIFEST_NAME

CACHE_BYTES = 20 << 30
SHA256 = re.compile("[0-9a-f]{64}")


class RemoteShards(LazyArrays):
    """Remote arrays. Opening one waits for its download; `prefetch` starts downloads in advance."""

    def __init__(self, files: Sequence[RemoteFile], cache: ShardCache) -> None:
        super().__init__([f"{cache.uri}/{file.name}" for file in files])
        self._files = files
        self._cache = cache

    @cached_property
    def lengths(self) -> IndexArray:
        return np.array([file.length for file in self._files], dtype=np.int64)

    @property
    def fits_in_cache(self) -> bool:
        """Whether the cache can hold the whole corpus, so that nothing is fetched twice."""
        return self._cache.can_hold_all

    def prefetch(self, upcoming: Sequence[int]) -> None:
        """Fetches shards in the background, in this order, as far as the cache has space.

        A shard leaves the list when it is opened; a later call replaces the list.
        """
        self._cache.prefetch([self._files[index] for index in upcoming])

    def open_array(self, index: int) -> NDArray[Any]:
        return self._cache.open(self._files[index], self)


@dataclass(frozen=True)
class RemoteCorpus:
    """A remote corpus of which only the manifest has been fetched. `folder` is its local cache."""

    uri: str
    folder: Path
    manifest: Manifest
    arrays: dict[str, RemoteShards]


def open_remote(location: Path | str, cache_dir: Path | None, cache_bytes: int) -> RemoteCorpus:
    """Raises UserError if there is no corpus at the URI, or the cache cannot hold two of its shards."""
    remote = RemoteFolder(location)
    folder = (cache_dir or find_cache_dir()) / "shards" / hashlib.sha256(remote.uri.encode()).hexdigest()[:16]
    manifest = _fetch_manifest(remote, folder)
    files: dict[str, list[RemoteFile]] = {}
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        files |= _list_files(name, split, np.dtype(manifest.dtype))
    everything = [file for listed in files.values() for file in listed]
    if not all(SHA256.fullmatch(file.sha256) for file in everything):
        raise UserError(f"{remote.uri}/{MANIFEST_NAME} has invalid checksums; upload the corpus again")
    needed_bytes = 2 * max((file.size_bytes for file in everything), default=0)  # one in use, one being prefetched
    if cache_bytes < needed_bytes:
        raise UserError(
            f"a cache of {cache_bytes:,} bytes cannot hold two shards of {remote.uri}; allow {needed_bytes:,} bytes"
        )
    cache = ShardCache(remote, folder, cache_bytes, everything)
    arrays = {name: RemoteShards(listed, cache) for name, listed in files.items()}
    return RemoteCorpus(remote.uri, folder, manifest, arrays)


def _list_files(name: str, split: Split, dtype: np.dtype[Any]) -> dict[str, list[RemoteFile]]:
    starts_dtype = np.dtype(np.int64)
    return {
        name: [RemoteFile(shard.file, shard.sha256, dtype, shard.tokens) for shard in split.shards],
        f"{name}_starts": [
            RemoteFile(f"{DOCUMENTS_DIR}/{shard.file}", shard.documents_sha256, starts_dtype, shard.documents)
            for shard in split.shards
        ],
    }


def _fetch_manifest(remote: RemoteFolder, folder: Path) -> Manifest:
    """Fetches and reads the manifest; errors name its URI, not the local copy."""
    content = remote.read(MANIFEST_NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:  # other processes may write the same file
            (Path(fresh) / MANIFEST_NAME).write_bytes(content)
            try:
                manifest = read_manifest(Path(fresh))
            except UserError as error:
                raise UserError(str(error).replace(fresh, remote.uri)) from None
            (Path(fresh) / MANIFEST_NAME).replace(folder / MANIFEST_NAME)
    except OSError as error:
        raise UserError(
            f"cannot write the cache {folder}: {error.strerror or error}; set GPTMILL_CACHE to another folder"
        ) from None
    return manifest
