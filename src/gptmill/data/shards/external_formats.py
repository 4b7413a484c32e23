"""External token formats, read in place: nanoGPT, llm.c and modded-nanogpt, build-nanogpt.

None of them records its tokenizer or its document boundaries.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptmill.config.errors import UserError
from gptmill.config.regular_files import open_regular
from gptmill.data.shards.arrays import MappedArrays, MapPool, StoredArray, find_array
from gptmill.data.shards.shard_manifest import DOCUMENTS_DIR, DTYPES, Manifest, Shard, Split
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint

SPLIT = re.compile(r"(?<![a-z])(train|val)(?![a-z])", re.IGNORECASE)
RAW_NAMES = ("train.bin", "val.bin")
PICKLED_VOCABULARY = "meta.pkl"
DEFAULT_TOKENIZER = "gpt2"
TRAINED_TOKENIZER = "char"
# llm.c, dev/data/data_common.py: 256 int32 (magic, version, number of tokens, zeros), then the tokens. Neither magic
# is a pair of valid GPT-2 tokens, so a file without a header cannot be mistaken for one with a header.
HEADER_BYTES = 1024
LLMC_FORMATS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
IDENTITY_BYTES = 1 << 20


@dataclass(frozen=True)
class ExternalCorpus:
    """A folder of external token files, described like a prepared corpus."""

    manifest: Manifest
    tokenizer: Tokenizer
    arrays: dict[str, MappedArrays]


def find_external_files(folder: Path) -> list[Path]:
    """Returns the files whose names say that they hold the tokens of a split."""
    if not folder.is_dir() or (folder / DOCUMENTS_DIR).exists():  # the latter: a prepared corpus without its manifest
        return []
    files = [path for path in folder.iterdir() if path.suffix in READERS and SPLIT.search(path.stem)]
    return sorted(path for path in files if path.is_file())


def open_external(folder: Path, tokenizer_name: str | None) -> ExternalCorpus:
    """Raises UserError unless the files are complete, of one format, and of a known tokenizer.

    A validation split may be missing: a run then trains without a validation loss.
    """
    stored: dict[str, list[StoredArray]] = {"train": [], "val": []}
    for path in find_external_files(folder):
        found = SPLIT.search(path.stem)
        assert found is not None
        stored[found[1].lower()].append(_find_tokens(path))
    if not stored["train"]:
        raise UserError(f"no token file in {folder} has 'train' in its name; add one, or prepare the text itself")
    kind, dtype = _check_one_format(folder, [*stored["train"], *stored["val"]])
    tokenizer = _choose_tokenizer(folder, tokenizer_name, dtype)
    train, val = (_describe_split(files) for files in stored.values())
    source = {"name": folder.name, "kind": kind}
    manifest = Manifest(dtype.name, tokenizer.spec(), make_fingerprint(tokenizer), source, {}, train, val)
    pool = MapPool()
    return ExternalCorpus(manifest, tokenizer, {name: MappedArrays(files, pool) for name, files in stored.items()})


def _find_tokens(path: Path) -> StoredArray:
    try:
        stored = READERS[path.suffix](path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions") from None
    except ValueError as error:
        raise UserError(f"{path} is not a readable token file: {error}; create it again") from None
    if stored.length == 0:
        raise UserError(f"{path} holds no tokens; remove it or create it again")
    return stored


def _find_npy(path: Path) -> StoredArray:
    stored = find_array(path)
    if stored.dtype not in DTYPES:
        raise ValueError(f"its dtype is {stored.dtype}, not {' or '.join(DTYPES)}")
    return stored


def _find_bin(path: Path) -> StoredArray:
    size_bytes = path.stat().st_size
    with open_regular(path) as file:
        header = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4")
    magic, version, tokens = header.tolist()
    if magic not in LLMC_FORMATS:
        if path.name not in RAW_NAMES:
            expected = " or ".join(map(str, LLMC_FORMATS))
            raise ValueError(f"its header starts with {magic}, not with llm.c's magic number {expected}")
        if size_bytes % 2:
            raise ValueError(f"without a header it must have 2 bytes for each token, but it has {size_bytes:,} bytes")
        return StoredArray(path, np.dtype("<u2"), size_bytes // 2, 0)
    expected_version, dtype = LLMC_FORMATS[magic]
    if version != expected_version:
        raise ValueError(f"its header has version {version}, not {expected_version}")
    expected_bytes = HEADER_BYTES + tokens * dtype.itemsize
    if size_bytes != expected_bytes:
        raise ValueError(f"its header implies {tokens:,} tokens in {expected_bytes:,} bytes, it has {size_bytes:,}")
    return StoredArray(path, dtype, tokens, HEADER_BYTES)


READERS: dict[str, Callable[[Path], StoredArray]] = {".bin": _find_bin, ".npy": _find_npy}


def _check_one_format(folder: Path, files: list[StoredArray]) -> tuple[str, np.dtype[Any]]:
    formats = {(_name_format(file), file.dtype): file.path.name for file in files}
    if len(formats) > 1:
        listed = ", ".join(f"{name} ({kind}, {dtype})" for (kind, dtype), name in formats.items())
        raise UserError(f"{folder} holds token files of several formats: {listed}; keep one format per folder")
    return next(iter(formats))


def _name_format(file: StoredArray) -> str:
    if file.path.suffix == ".npy":
        return "npy"
    return "llm.c" if file.offset else "nanoGPT"


def _choose_tokenizer(folder: Path, name: str | None, dtype: np.dtype[Any]) -> Tokenizer:
    if (folder / PICKLED_VOCABULARY).exists():
        raise UserError(
            f"{folder} has its own vocabulary in {PICKLED_VOCABULARY}, and gptmill opens no pickle because it can run "
            f"code; prepare the text itself: gptmill prepare TEXT --tokenizer char"
        )
    if name is None and dtype.itemsize > 2:
        raise UserError(f"{folder} holds Llama 3 tokens; name their tokenizer: --tokenizer PATH/TO/tokenizer.json")
    if name == TRAINED_TOKENIZER:
        raise UserError(
            f"{folder} does not record which characters its tokens encode; name the tokenizer that it was made with, "
            f"or prepare the text itself: gptmill prepare TEXT --tokenizer {name}"
        )
    return build_tokenizer(name or DEFAULT_TOKENIZER, ())


def _describe_split(files: Iterable[StoredArray]) -> Split:
    """Describes a split without reading all of it; the number of documents is unknown and given as 0."""
    shards = tuple(Shard(file.path.name, file.length, hash_ends(file.path), 0, "") for file in files)
    return Split(0, sum(shard.tokens for shard in shards), shards)


def hash_ends(path: Path) -> str:
    """Returns a cheap identity of a file: the SHA-256 of its size and of its first and last MiB."""
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    with open_regular(path) as file:
        digest.update(file.read(IDENTITY_BYTES))
        file.seek(max(0, size_bytes - IDENTITY_BYTES))
        digest.update(file.read(IDENTITY_BYTES))
    return digest.hexdigest()
