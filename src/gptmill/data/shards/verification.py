"""Verification: compares the bytes of a corpus with its manifest, all of them or a portion at each start of a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from gptmill.config.errors import UserError
from gptmill.config.regular_files import open_regular
from gptmill.data.files import hash_file
from gptmill.data.shards.arrays import IndexArray, MappedArrays, StoredArray
from gptmill.data.shards.external_formats import find_external_files, open_external
from gptmill.data.shards.opening import (
    PREPARE_AGAIN,
    TokenShards,
    describe_change,
    find_shard,
    restore_expected_tokenizer,
)
from gptmill.data.shards.shard_manifest import (
    DOCUMENTS_DIR,
    NAMES_NAME,
    ORIGINS_DIR,
    Manifest,
    Shard,
    Split,
    read_manifest,
)
from gptmill.data.shards.shard_manifest import FILE_NAME as MANIFEST_NAME
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import TokenArray

MAX_THREADS = 8
BLOCK_BYTES = 1 << 22
PORTION_BYTES = 64_000_000  # hashed in a third of a second on a slow core

# Called with (bytes done, bytes in total), by one thread at a time.
VerifyReport = Callable[[int, int], None]


def verify_corpus(folder: Path, report: VerifyReport, tokenizer_name: str | None = None) -> list[str]:
    """Returns the problems of a local corpus, one sentence each; none if it is as it was prepared.

    External formats have no checksums: only file sizes and the range of tokens are checked.
    """
    try:
        if not (folder / MANIFEST_NAME).exists() and find_external_files(folder):
            return _verify_external(folder, report, tokenizer_name)
        return _verify_prepared(folder, report, tokenizer_name)
    except UserError as error:
        return [str(error)]


def verify_portion(corpora: Sequence[TokenShards], turn: int) -> None:
    """Compares one portion of the local prepared corpora with their checksums; raises UserError for the first change.

    A portion is a shard or, of small ones, as many as fit into PORTION_BYTES. Consecutive turns take all in a cycle.
    """
    portions: list[list[tuple[Path, Path, str]]] = []
    filled = PORTION_BYTES
    for shards in corpora:
        if not isinstance(shards.train_starts, MappedArrays):  # external: no checksums; remote: verified when fetched
            continue
        item_bytes = np.dtype(shards.manifest.dtype).itemsize
        for shard in (*shards.manifest.train.shards, *shards.manifest.val.shards):
            size_bytes = shard.tokens * item_bytes + shard.documents * 8
            if filled + size_bytes > PORTION_BYTES:
                portions.append([])
                filled = 0
            filled += size_bytes
            portions[-1] += [
                (shards.folder, shards.folder / shard.file, shard.sha256),
                (shards.folder, shards.folder / DOCUMENTS_DIR / shard.file, shard.documents_sha256),
            ]
    for folder, path, sha256 in portions[turn % len(portions)] if portions else []:
        try:
            is_same = hash_file(path) == sha256
        except OSError as error:
            raise UserError(f"cannot read shard {path}: {error.strerror or error}; {PREPARE_AGAIN}") from None
        if not is_same:
            raise describe_change(folder, path)


def _verify_prepared(folder: Path, report: VerifyReport, tokenizer_name: str | None) -> list[str]:
    manifest = read_manifest(folder)
    tokenizer = restore_expected_tokenizer(manifest, str(folder), tokenizer_name)
    shards = [*manifest.train.shards, *manifest.val.shards]
    dtype, starts_dtype = np.dtype(manifest.dtype), np.dtype(np.int64)
    total_bytes = sum(shard.tokens * dtype.itemsize + shard.documents * starts_dtype.itemsize for shard in shards)
    progress = _Progress(total_bytes, report)
    problems = [*_check_totals(folder, "train", manifest.train), *_check_totals(folder, "val", manifest.val)]
    problems += _check_origins(folder / ORIGINS_DIR / NAMES_NAME, manifest.names_sha256)
    return problems + _run([partial(_check_shard, folder, manifest, shard, tokenizer, progress) for shard in shards])


def _verify_external(folder: Path, report: VerifyReport, tokenizer_name: str | None) -> list[str]:
    corpus = open_external(folder, tokenizer_name)
    files = [*corpus.arrays["train"].files, *corpus.arrays["val"].files]
    progress = _Progress(sum(file.length * file.dtype.itemsize for file in files), report)
    return _run([partial(_check_tokens, file, corpus.tokenizer, progress) for file in files])


def _run(checks: list[Callable[[], list[str]]]) -> list[str]:
    """Returns the problems of all checks, run in threads: hashing releases the GIL."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return [problem for problems in pool.map(lambda check: check(), checks) for problem in problems]


class _Progress:
    def __init__(self, total_bytes: int, report: VerifyReport) -> None:
        self._total = total_bytes
        self._done = 0
        self._report = report
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._done += size_bytes
            self._report(self._done, self._total)


def _check_totals(folder: Path, name: str, split: Split) -> Iterator[str]:
    tokens, documents = (sum(getattr(shard, what) for shard in split.shards) for what in ("tokens", "documents"))
    if (tokens, documents) != (split.tokens, split.documents):
        yield (
            f"{folder / MANIFEST_NAME} counts {split.tokens:,} tokens and {split.documents:,} documents in {name}, but "
            f"its shards have {tokens:,} and {documents:,}"
        )


def _check_shard(
    folder: Path, manifest: Manifest, shard: Shard, tokenizer: Tokenizer, progress: _Progress
) -> list[str]:
    problems: list[str] = []
    starts: IndexArray | None = None
    tokens_path, starts_path = folder / shard.file, folder / DOCUMENTS_DIR / shard.file
    try:
        starts = find_shard(starts_path, np.dtype(np.int64), shard.documents).map()
        problems += _check_sha256(starts_path, shard.documents_sha256)
        progress.add(starts.nbytes)
    except UserError as error:
        problems.append(str(error))
    try:
        tokens = find_shard(tokens_path, np.dtype(manifest.dtype), shard.tokens)
        problems += _check_sha256(tokens_path, shard.sha256)
        problems += _check_tokens(tokens, tokenizer, progress, starts)
    except UserError as error:
        problems.append(str(error))
    problems += _check_origins(folder / ORIGINS_DIR / shard.file, shard.origins_sha256)
    return problems


def _check_origins(path: Path, sha256: str) -> Iterator[str]:
    """Checks a file about the sources of documents, unless the corpus is of a version without its checksum."""
    if sha256:
        yield from _check_sha256(path, sha256)


def _check_sha256(path: Path, sha256: str) -> Iterator[str]:
    try:
        if hash_file(path) != sha256:
            yield f"{path} changed after it was prepared: its SHA-256 differs from the manifest's"
    except OSError as error:
        yield f"cannot read {path}: {error.strerror or error}; {PREPARE_AGAIN}"


def _check_tokens(
    stored: StoredArray, tokenizer: Tokenizer, progress: _Progress, starts: IndexArray | None = None
) -> list[str]:
    """Returns the first token outside the vocabulary, and the first block whose document starts are wrong."""
    problems: dict[str, str] = {}
    seen = 0
    for position, tokens in _read_blocks(stored):
        if tokens.max() >= tokenizer.vocab_size:
            first = int(np.argmax(tokens >= tokenizer.vocab_size))
            problem = f"holds token {tokens[first]} at position {position + first:,}, outside the vocabulary of"
            problems.setdefault("token", f"{stored.path} {problem} {tokenizer.vocab_size:,}")
        if starts is not None:
            found = np.flatnonzero(tokens == tokenizer.end_of_text) + position
            if not np.array_equal(found, starts[seen : seen + len(found)]):
                problems.setdefault("starts", _describe_starts(stored.path, seen, position, position + len(tokens)))
            seen += len(found)
        progress.add(tokens.nbytes)
    if starts is not None and seen != len(starts):
        problem = f"{len(starts):,} documents should start in it, but {seen:,} do"
        problems.setdefault("starts", f"{stored.path}: {problem}")
    return list(problems.values())


def _describe_starts(path: Path, number: int, first: int, last: int) -> str:
    return (
        f"{path}: from document {number:,} on, between positions {first:,} and {last:,}, documents do not start "
        f"where {DOCUMENTS_DIR}/{path.name} says"
    )


def _read_blocks(stored: StoredArray) -> Iterator[tuple[int, TokenArray]]:
    """Yields (position, tokens). Files are read, not mapped, so that large ones do not fill the process's memory."""
    block_tokens = BLOCK_BYTES // stored.dtype.itemsize
    with open_regular(stored.path) as file:
        file.seek(stored.offset)
        for position in range(0, stored.length, block_tokens):
            yield position, np.fromfile(file, stored.dtype, min(block_tokens, stored.length - position))
