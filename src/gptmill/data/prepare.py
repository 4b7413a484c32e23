"""Prepares sources as token shards. A folder becomes a corpus by one atomic rename; a killed preparation resumes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.plugins import PARTS, ReadingPartOptions
from gptmill.config.requests import PrepareRequest
from gptmill.config.schema import list_values
from gptmill.data.cleaning import check_cleaning
from gptmill.data.files import flush_to_disk, hold_lock
from gptmill.data.pipeline.corpus_writer import remove_temporary_files, write_corpus
from gptmill.data.pipeline.journal import FILE_NAME as JOURNAL_NAME
from gptmill.data.pipeline.prepare_job import PrepareJob
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.data.shards.shard_manifest import (
    DOCUMENTS_DIR,
    FILE_NAME,
    OLD_NAMES_NAME,
    ORIGINS_DIR,
    SCORES_DIR,
    Manifest,
    read_manifest,
)
from gptmill.data.sources import Source, make_source_name, resolve_source
from gptmill.data.sources.formats import find_suffix
from gptmill.data.sources.source import find_own_source
from gptmill.data.tokenizers import identify_tokenizer

LOCK_NAME = ".lock"
PARTIAL = ".partial"
OWN_NAMES = (FILE_NAME, LOCK_NAME, PARTIAL, DOCUMENTS_DIR, ORIGINS_DIR, SCORES_DIR, "lost+found")


def default_data_dir(inputs: list[str], tokenizer: str) -> Path:
    return Path("data") / f"{make_source_name(inputs)}-{identify_tokenizer(tokenizer)}"


def prepare_corpus(inputs: list[str], request: PrepareRequest, report: Report) -> tuple[Path, Manifest]:
    """Writes the shards of the corpus, unless the folder already contains exactly these."""
    _check_request(request)
    source = resolve_source(inputs, request.reading)
    val_source = resolve_source([request.val_source], request.reading) if request.val_source else None
    named = Path(request.out) if request.out else default_data_dir(inputs, request.tokenizer)
    folder = named.resolve()
    origin = _describe_origin(source, val_source, request)
    if folder.exists() and not (folder.is_dir() and all(_is_ours(path) for path in folder.iterdir())):
        raise UserError(f"{named} contains other files than a prepared corpus; choose another --out")
    partial = _choose_partial(folder)
    if is_finished := (partial / FILE_NAME).exists():
        with _hold(partial, folder):
            _put_in_place(partial, folder)
    if (folder / FILE_NAME).exists() and (is_finished or not request.overwrite):
        manifest = read_manifest(folder)
        if manifest.source == origin:
            return named, manifest
        if not request.overwrite:
            raise UserError(
                f"{named} was prepared from another corpus or with other options; add --overwrite or choose another "
                f"--out"
            )
    return named, _write_folder(folder, PrepareJob(source, val_source, request, origin), report)


def _is_ours(path: Path) -> bool:
    """Whether a file has a name that a preparation writes, or that every disk has at its root."""
    return path.name in OWN_NAMES or path.match("train_*.npy") or path.match("val_*.npy")


def _check_request(request: PrepareRequest) -> None:
    problems = check_cleaning(request.cleaning)
    if not 0 <= request.val_fraction < 1:
        problems.append(Problem(f"--val_fraction {request.val_fraction}", "must be at least 0 and below 1"))
    if request.shard_tokens < 1:
        problems.append(Problem(f"--shard_tokens {request.shard_tokens}", "must be at least 1"))
    if request.reading.max_errors < 1:
        problems.append(Problem(f"--max_errors {request.reading.max_errors}", "must be at least 1"))
    if request.processes is not None and request.processes < 1:
        problems.append(Problem(f"--processes {request.processes}", "must be at least 1"))
    if request.cluster is not None and request.processes is not None:
        problems.append(
            Problem("--processes", "cannot be combined with --cluster, which has its own workers; drop one")
        )
    if problems:
        raise ConfigError(problems)


def _describe_origin(source: Source, val_source: Source | None, request: PrepareRequest) -> dict[str, Any]:
    """Describes everything that determines the bytes of the shards, for the manifest."""
    reading = list_values(replace(request.reading, reading_parts=ReadingPartOptions()))
    del reading["from_file"]  # where a named corpus was stored; the listing identifies its content
    del reading["max_errors"]  # does not affect the shards, and may be raised to resume
    del reading["max_expansion"]  # a limit, which changes no text
    if reading["on_error"] == "stop":
        del reading["on_error"]  # the only choice when older corpora were prepared
    return {
        **_describe_source(source),
        "val_source": _describe_source(val_source) if val_source else None,
        "tokenizer": identify_tokenizer(request.tokenizer),
        "val_fraction": request.val_fraction,
        "split": request.split,
        "shard_tokens": request.shard_tokens,
        "reading": reading,
        "cleaning": asdict(request.cleaning),
        **({"plugins": parts} if (parts := _describe_parts(source, val_source, request)) else {}),
    }


def _describe_parts(source: Source, val_source: Source | None, request: PrepareRequest) -> dict[str, Any]:
    """The code and the options of the plug-ins' parts that the corpus is made with."""
    used: set[tuple[str, str | None]] = {("tokenizer", request.tokenizer)}
    for file in (*source.files, *(val_source.files if val_source else ())):
        used |= {("source", find_own_source(file.uri)), ("format", find_suffix(file.path_name))}
    parts = [part for key, part in PARTS.items() if key in used]
    options = request.reading.reading_parts
    return {
        f"{part.kind} {part.name}": {"code": part.fingerprint, **list_values(options.find(part.options))}
        for part in parts
    }


def _describe_source(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "files": len(source.files),
        "bytes": source.size_bytes,
        "listing_sha256": source.listing_sha256,
        # Of every file, not the latest alone: a file may be replaced by an older one of the same size.
        "changes_sha256": hashlib.sha256(repr([file.mtime_ns for file in source.files]).encode()).hexdigest(),
    }


def _choose_partial(folder: Path) -> Path:
    """Where a corpus is written first: beside its folder, or inside one that exists, since a volume has no beside."""
    beside = folder.with_name(folder.name + PARTIAL)
    return folder / PARTIAL if folder.exists() and not beside.exists() else beside


def _write_folder(folder: Path, job: PrepareJob, report: Report) -> Manifest:
    """Writes into a temporary folder, which stays after a kill or on a full disk so that the same command resumes."""
    partial = _choose_partial(folder)
    missing_parents = [parent for parent in partial.parents if not parent.exists()]
    try:
        with _hold(partial, folder):
            try:
                manifest = write_corpus(partial, job, report)
                _put_in_place(partial, folder)
            finally:  # while the lock is held, so that no other process uses the folder
                if partial.exists() and not any((partial / name).exists() for name in (JOURNAL_NAME, FILE_NAME)):
                    shutil.rmtree(partial, ignore_errors=True)
    finally:
        for parent in missing_parents:
            with suppress(OSError):  # keeps those that are not empty
                parent.rmdir()
    return manifest


@contextmanager
def _hold(partial: Path, folder: Path) -> Iterator[None]:
    """Locks the temporary folder; turns errors of the file system into sentences."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        held = f"{folder} is being prepared by another process; wait for it, or choose another --out"
        with hold_lock(partial / LOCK_NAME, held):
            yield
    except OSError as error:
        advice, reason = "fix that or choose another folder, and run the same command again", error.strerror or error
        if (partial / FILE_NAME).exists():
            reason = f"{reason}; the finished corpus is kept in {partial}"
            advice = "fix that, and run the same command again, which only moves it"
        raise UserError(f"cannot write {folder}: {reason}; {advice}") from None


def _put_in_place(partial: Path, folder: Path) -> None:
    """Makes `folder` the finished corpus. Where it fails or is killed, the next preparation goes on with it."""
    remove_temporary_files(partial)
    if not folder.exists():
        partial.rename(folder)
        (folder / LOCK_NAME).unlink()
        flush_to_disk(folder.parent)
        return
    manifest = read_manifest(partial)
    shards = {shard.file for split in (manifest.train, manifest.val) for shard in split.shards}
    (folder / FILE_NAME).unlink(missing_ok=True)  # without it, what is now replaced is not taken for a corpus
    for name in (DOCUMENTS_DIR, ORIGINS_DIR, "."):  # the first one tells that the shards are not another program's
        (folder / name).mkdir(exist_ok=True)
        for path in (partial / name).iterdir():
            if path.is_file() and path.name not in (FILE_NAME, LOCK_NAME):
                shutil.move(path, folder / name / path.name)  # copies where the folder is on another file system
                flush_to_disk(folder / name / path.name)
        for path in (folder / name).glob("*.npy"):
            if path.name not in shards:
                path.unlink()
        flush_to_disk(folder / name)
    (folder / ORIGINS_DIR / OLD_NAMES_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder / SCORES_DIR, ignore_errors=True)
    shutil.move(partial / FILE_NAME, folder / FILE_NAME)
    flush_to_disk(folder)
    shutil.rmtree(partial, ignore_errors=True)
