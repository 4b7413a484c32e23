"""Documents to token shards. The folder appears whole, by one rename, or not at all."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.files import hash_file
from gptmill.data.manifest import FILE_NAME, Manifest, Shard, Split, read_manifest, write_manifest
from gptmill.data.sources import Source, make_source_name, open_source
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype, make_fingerprint

FEW_DOCUMENTS = 10  # fewer expected in validation than this, and the tail of each document is fairer
MIN_VAL_BYTES = 8192  # a window of validation, even from a small corpus
MAX_RAISED_FRACTION = 0.1


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation is."""

    bytes_done: int
    bytes_total: int
    tokens: int


Report = Callable[[PrepareProgress], None]


def default_data_dir(places: list[str], tokenizer: str) -> Path:
    return Path("data") / f"{make_source_name(places)}-{tokenizer}"


def prepare_corpus(places: list[str], request: PrepareRequest, report: Report) -> tuple[Path, Manifest]:
    """Writes the shards of the corpus, unless the folder holds exactly them already."""
    if not 0 < request.val_fraction < 1:
        raise UserError(f"val_fraction = {request.val_fraction}: must lie between 0 and 1")
    if request.shard_tokens < 1:
        raise UserError(f"shard_tokens = {request.shard_tokens}: must be at least 1")
    source = open_source(places)
    folder = Path(request.out) if request.out else default_data_dir(places, request.tokenizer)
    origin = _describe_origin(source, request)
    if folder.exists() and not (folder / FILE_NAME).exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not a prepared corpus; choose another --out")
    if (folder / FILE_NAME).exists() and not request.overwrite:
        manifest = read_manifest(folder)
        if manifest.source == origin:
            return folder, manifest
        raise UserError(f"{folder} holds another corpus or other options; add --overwrite or choose another --out")
    return folder, _write_folder(source, request, folder, origin, report)


def _write_folder(
    source: Source, request: PrepareRequest, folder: Path, origin: dict[str, Any], report: Report
) -> Manifest:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tokenizer = build_tokenizer(request.tokenizer, source.read_documents())
        manifest = _write_shards(source, request, tokenizer, partial, origin, report)
        write_manifest(partial, manifest)
        _replace(folder, partial)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; free space there or choose another --out") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _replace(folder: Path, partial: Path) -> None:
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_shards(
    source: Source,
    request: PrepareRequest,
    tokenizer: Tokenizer,
    folder: Path,
    origin: dict[str, Any],
    report: Report,
) -> Manifest:
    writers = {name: _ShardWriter(folder, name, tokenizer, request.shard_tokens) for name in ("train", "val")}
    bytes_done = 0
    for text in source.read_documents():
        for name, part in _split_document(text, source, request):
            writers[name].write(part)
        bytes_done += len(text.encode("utf-8"))
        tokens = sum(writer.tokens for writer in writers.values())
        report(PrepareProgress(bytes_done, source.size_bytes, tokens))
    splits = {name: writer.finish() for name, writer in writers.items()}
    for name, split in splits.items():
        if split.tokens == 0:
            advice = "give more text, a larger --val_fraction, or --split tail"
            raise UserError(f"the {name} split of {source.name} would be empty; {advice}")
    dtype = choose_dtype(tokenizer.vocab_size).name
    return Manifest(dtype, tokenizer.spec(), make_fingerprint(tokenizer), origin, splits["train"], splits["val"])


def _split_document(text: str, source: Source, request: PrepareRequest) -> Iterator[tuple[str, str]]:
    """Which text goes where: a pure function of the document, so that the split never depends on the order."""
    by_document = len(source.files) * request.val_fraction >= FEW_DOCUMENTS
    if request.split == "documents" or (request.split == "auto" and by_document):
        draw = int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") / 2**64
        yield ("val" if draw < request.val_fraction else "train"), text
        return
    raised = min(MAX_RAISED_FRACTION, MIN_VAL_BYTES / source.size_bytes)
    cut = int(len(text) * (1 - max(request.val_fraction, raised)))
    yield from ((name, part) for name, part in (("train", text[:cut]), ("val", text[cut:])) if part)


def _describe_origin(source: Source, request: PrepareRequest) -> dict[str, Any]:
    """What decides the shards' bytes, for the manifest."""
    return {
        "name": source.name,
        "files": len(source.files),
        "bytes": source.size_bytes,
        "listing_sha256": source.digest,
        "tokenizer": request.tokenizer,
        "val_fraction": request.val_fraction,
        "split": request.split,
        "shard_tokens": request.shard_tokens,
    }


class _ShardWriter:
    """Gathers documents into shards of a fixed number of tokens."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self.tokens = 0
        self._folder = folder
        self._split = split
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._dtype = choose_dtype(tokenizer.vocab_size)
        self._documents = 0
        self._pending: list[TokenArray] = []
        self._pending_tokens = 0
        self._shards: list[Shard] = []

    def write(self, text: str) -> None:
        opening = np.array([self._tokenizer.end_of_text], dtype=self._dtype)
        ids = np.concatenate([opening, self._tokenizer.encode(text)])
        self._documents += 1
        self.tokens += len(ids)
        while len(ids):
            room = self._shard_tokens - self._pending_tokens
            self._pending.append(ids[:room])
            self._pending_tokens += len(ids[:room])
            ids = ids[room:]
            if self._pending_tokens == self._shard_tokens:
                self._flush()

    def finish(self) -> Split:
        if self._pending_tokens:
            self._flush()
        return Split(self._documents, self.tokens, tuple(self._shards))

    def _flush(self) -> None:
        path = self._folder / f"{self._split}_{len(self._shards):06d}.npy"
        np.save(path, np.concatenate(self._pending))
        self._shards.append(Shard(path.name, self._pending_tokens, hash_file(path)))
        self._pending, self._pending_tokens = [], 0
