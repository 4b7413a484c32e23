"""Documents to token shards. The folder appears whole, by one rename, or not at all."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.files import flush_to_disk
from gptmill.data.manifest import DOCUMENTS_DIR, FILE_NAME, Manifest, read_manifest, write_manifest
from gptmill.data.sources import Source, make_source_name, open_source, read_documents
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.protocol import choose_dtype, make_fingerprint
from gptmill.data.writer import ShardWriter

FEW_DOCUMENTS = 5  # fewer expected in validation than this, and the tail of each document is fairer
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
    _check_request(request)
    source = open_source(places, request.reading)
    named = Path(request.out) if request.out else default_data_dir(places, request.tokenizer)
    folder = named.resolve()  # through links, so that the shards land where a link points
    if Path.cwd().is_relative_to(folder):
        raise UserError(f"--out {named} is the folder that you are in, or above it; name a folder inside it")
    origin = _describe_origin(source, request)
    if folder.exists() and not (folder.is_dir() and all(_is_ours(path) for path in folder.iterdir())):
        raise UserError(f"{named} holds other things than a prepared corpus; choose another --out")
    if (folder / FILE_NAME).exists() and not request.overwrite:
        manifest = read_manifest(folder)
        if manifest.source == origin:
            return named, manifest
        raise UserError(f"{named} holds another corpus or other options; add --overwrite or choose another --out")
    return named, _write_folder(source, request, folder, origin, report)


def _is_ours(path: Path) -> bool:
    """Whether a file has a name that only preparing gives; nothing else is ever deleted."""
    return path.name in (FILE_NAME, DOCUMENTS_DIR) or any(
        path.match(pattern) for pattern in ("train_*.npy", "val_*.npy")
    )


def _check_request(request: PrepareRequest) -> None:
    problems = []
    if not 0 < request.val_fraction < 1:
        problems.append(Problem(f"--val_fraction {request.val_fraction}", "must lie between 0 and 1"))
    if request.shard_tokens < 1:
        problems.append(Problem(f"--shard_tokens {request.shard_tokens}", "must be at least 1"))
    if problems:
        raise ConfigError(problems)


def _write_folder(
    source: Source, request: PrepareRequest, folder: Path, origin: dict[str, Any], report: Report
) -> Manifest:
    partial = folder.with_name(folder.name + ".partial")
    missing_parents = [parent for parent in partial.parents if not parent.exists()]
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / DOCUMENTS_DIR).mkdir(parents=True)
        tokenizer = build_tokenizer(request.tokenizer, read_documents(source, request.reading))
        manifest = _write_shards(source, request, tokenizer, partial, origin, report)
        write_manifest(partial, manifest)
        _replace(folder, partial)
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}; make room there or choose another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in missing_parents:
            with suppress(OSError):  # keeps those that hold the corpus now
                parent.rmdir()
    return manifest


def _replace(folder: Path, partial: Path) -> None:
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    flush_to_disk(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_shards(
    source: Source,
    request: PrepareRequest,
    tokenizer: Tokenizer,
    folder: Path,
    origin: dict[str, Any],
    report: Report,
) -> Manifest:
    writers = {name: ShardWriter(folder, name, tokenizer, request.shard_tokens) for name in ("train", "val")}
    bytes_done = 0
    for text in read_documents(source, request.reading):
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
    return Manifest(dtype, tokenizer.spec(), make_fingerprint(tokenizer), origin, {}, splits["train"], splits["val"])


def _split_document(text: str, source: Source, request: PrepareRequest) -> Iterator[tuple[str, str]]:
    """Which text goes where: a pure function of the document, so that the split never depends on the order."""
    by_document = len(source.files) * request.val_fraction >= FEW_DOCUMENTS
    if request.split == "documents" or (request.split == "auto" and by_document):
        draw = int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") / 2**64
        yield ("val" if draw < request.val_fraction else "train"), text
        return
    raised = min(MAX_RAISED_FRACTION, MIN_VAL_BYTES / source.size_bytes)
    cut = len(text) - round(len(text) * max(request.val_fraction, raised))
    yield from ((name, part) for name, part in (("train", text[:cut]), ("val", text[cut:])) if part)


def _describe_origin(source: Source, request: PrepareRequest) -> dict[str, Any]:
    """What decides the shards' bytes, for the manifest."""
    return {
        "name": source.name,
        "files": len(source.files),
        "bytes": source.size_bytes,
        "listing_sha256": source.listing_sha256,
        "newest_change": source.newest_change,
        "tokenizer": request.tokenizer,
        "val_fraction": request.val_fraction,
        "split": request.split,
        "shard_tokens": request.shard_tokens,
    }
