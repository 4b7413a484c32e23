"""From an opened corpus to a folder of shards: learn the tokenizer, encode everything, mend a split too small."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.data.cleaning import DuplicateIndex
from gptmill.data.files import write_durably
from gptmill.data.pipeline.chunks import START, Position, make_chunks
from gptmill.data.pipeline.encoding import Job, encode_chunk, encode_pieces, load_worker, read_clean
from gptmill.data.pipeline.executors import Workers, count_cores, map_in_order, open_executor
from gptmill.data.pipeline.journal import FILE_NAME as JOURNAL_NAME
from gptmill.data.pipeline.journal import Journal, read_journal
from gptmill.data.pipeline.opened import OpenedCorpus
from gptmill.data.pipeline.prepare_progress import PrepareProgress, Report
from gptmill.data.pipeline.shard_writer import ShardWriter
from gptmill.data.pipeline.space_check import check_disk_space
from gptmill.data.pipeline.splitting import write_chunk
from gptmill.data.shards.shard_manifest import (
    DOCUMENTS_DIR,
    FILE_NAME,
    NAMES_NAME,
    ORIGINS_DIR,
    Manifest,
    read_manifest,
    write_manifest,
)
from gptmill.data.sources import SourceFile
from gptmill.data.tokenizers import Tokenizer, build_tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import choose_dtype, make_fingerprint

DUPLICATES_NAME = "duplicates.sqlite"
JOURNAL_SECONDS = 2.0
INLINE_BYTES = 8 * 2**20  # a corpus that is encoded before a pool of processes would have started


def write_corpus(folder: Path, corpus: OpenedCorpus, report: Report) -> Manifest:
    """Fills the folder, from where an earlier attempt at the same corpus was; leaves only what belongs to a corpus."""
    if (folder / FILE_NAME).exists() and (manifest := read_manifest(folder)).source == corpus.origin:
        return _tidy(folder, manifest)
    journal = read_journal(folder, corpus.origin)
    if journal is None:
        _clear(folder)
        journal = Journal(corpus.origin, val_limit=corpus.val_limit)
    request = corpus.request
    is_small = 0 < corpus.size_bytes <= INLINE_BYTES
    processes = request.processes or (1 if is_small else count_cores())
    with open_executor(processes, request.cluster, load_worker) as workers:
        tokenizer = _make_tokenizer(folder, corpus, journal)
        if journal.chunks == 0:
            check_disk_space(folder, corpus, tokenizer)
        _encode_all(folder, corpus, tokenizer, journal, workers, report)
        if corpus.draws_documents and (raised := journal.find_raised_limit()):
            (folder / JOURNAL_NAME).unlink(missing_ok=True)
            _clear(folder)
            journal = Journal(corpus.origin, tokenizer.spec(), val_limit=raised)
            _encode_all(folder, corpus, tokenizer, journal, workers, report)
    return _finish(folder, corpus, tokenizer, journal)


def _clear(folder: Path) -> None:
    """Everything but the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def _make_tokenizer(folder: Path, corpus: OpenedCorpus, journal: Journal) -> Tokenizer:
    if journal.tokenizer is not None:
        return restore_tokenizer(journal.tokenizer, f"{folder / JOURNAL_NAME}")
    request = corpus.request
    chunks = make_chunks(corpus.files, request.reading, START)
    tokenizer = build_tokenizer(request.tokenizer, read_clean(chunks, request.reading, request.cleaning))
    journal.tokenizer = tokenizer.spec()
    return tokenizer


def _encode_all(
    folder: Path, corpus: OpenedCorpus, tokenizer: Tokenizer, journal: Journal, workers: Workers, report: Report
) -> None:
    """One pass over what the journal says is left of the corpus."""
    request = corpus.request
    for name in (DOCUMENTS_DIR, ORIGINS_DIR):
        (folder / name).mkdir(exist_ok=True)
    job = Job(
        tokenizer.spec(),
        make_fingerprint(tokenizer),
        request.reading,
        request.cleaning,
        corpus.first_val_file,
        corpus.tail_fraction,
    )
    dtype = choose_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(closing(ShardWriter(folder, name, dtype, request.shard_tokens, state)))
            for name, state in (("train", journal.train), ("val", journal.val))
        ]
        index = DuplicateIndex(folder / DUPLICATES_NAME, request.cleaning, journal.chunks)
        stack.enter_context(closing(index))
        chunks = make_chunks(corpus.files, request.reading, journal.position)
        make_progress = partial(_make_progress, corpus, journal, journal.source_bytes, journal.text_bytes)
        saved = time.monotonic()
        for chunk, encoded in map_in_order(partial(encode_chunk, job=job), chunks, workers):
            write_chunk(encoded, journal, writers, index)
            if not encoded.is_whole:  # a small file that unpacks to a large one: the rest bit by bit, here
                for piece in encode_pieces(chunk, job, len(encoded.documents)):
                    write_chunk(piece, journal, writers, index)
            journal.advance(chunk)
            report(make_progress())
            if time.monotonic() - saved >= JOURNAL_SECONDS:
                _save(folder, journal, writers, index)
                saved = time.monotonic()
        for writer in writers:
            writer.finish()


def _save(folder: Path, journal: Journal, writers: list[ShardWriter], index: DuplicateIndex) -> None:
    """The journal last: what it tells of is durable by then."""
    for writer in writers:
        writer.flush()
    index.commit()
    journal.save(folder)


def _make_progress(corpus: OpenedCorpus, journal: Journal, bytes_kept: int, text_bytes_kept: int) -> PrepareProgress:
    return PrepareProgress(
        bytes_done=journal.source_bytes,
        bytes_total=corpus.size_bytes,
        text_bytes=journal.text_bytes,
        tokens=journal.train.tokens + journal.val.tokens,
        bytes_kept=bytes_kept,
        text_bytes_kept=text_bytes_kept,
        is_done=journal.position == Position(len(corpus.files), 0),
    )


def _finish(folder: Path, corpus: OpenedCorpus, tokenizer: Tokenizer, journal: Journal) -> Manifest:
    _check_unchanged(corpus.files)
    _check_splits(corpus.source.name, journal)
    # As JSON spells them, without its quotes: one name a line, whatever characters it has.
    readable = (os.fsencode(file.name).decode(errors="replace") for file in corpus.files)
    names = "".join(json.dumps(name, ensure_ascii=False)[1:-1] + "\n" for name in readable)
    write_durably(folder / ORIGINS_DIR / NAMES_NAME, names)
    manifest = Manifest(
        choose_dtype(tokenizer.vocab_size).name,
        tokenizer.spec(),
        make_fingerprint(tokenizer),
        corpus.origin,
        journal.report.to_json(),
        journal.train.make_split(),
        journal.val.make_split(),
    )
    write_manifest(folder, manifest)
    return _tidy(folder, manifest)


def _check_unchanged(files: tuple[SourceFile, ...]) -> None:
    """Raises UserError for a file that is not what it was when the preparation began: its shards would be a mixture."""
    for file in files:
        if file.mtime_ns and (path := Path(file.uri)).is_file():
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                raise UserError(f"{path} changed while it was being prepared; give the same command again")


def _check_splits(name: str, journal: Journal) -> None:
    """Raises UserError where there is nothing to train on, or nothing to validate with."""
    dropped = sum(entry.documents for entry in journal.report.dropped.values())
    if journal.train.tokens + journal.val.tokens == 0:
        cause = f"cleaning dropped all {dropped:,} documents of {name}" if dropped else f"there is no text in {name}"
        raise UserError("; ".join([cause, "loosen the filters" if dropped else "name files that hold some"]))
    if journal.train.tokens == 0:
        raise UserError(
            f"{name} would leave nothing to train on; give more text, a smaller --val_fraction or --split tail"
        )
    if journal.val.tokens == 0:
        raise UserError(f"{name} would leave nothing for validation; give more text or --split tail, or --val_source")


def _tidy(folder: Path, manifest: Manifest) -> Manifest:
    """Takes away what served the preparation alone; done last, so that a kill before it loses nothing."""
    for path in folder.iterdir():
        if path.name == JOURNAL_NAME or path.name.startswith(DUPLICATES_NAME):
            path.unlink()
    return manifest
