"""Writes a corpus to a folder of shards: trains the tokenizer, encodes all documents, enlarges a tiny validation split.

Progress is saved to a journal every few seconds, so that a killed preparation resumes.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.plugins import ReadingPartOptions, name_reloadable
from gptmill.data.cleaning import DuplicateIndex
from gptmill.data.pipeline.chunks import START, Position, make_chunks
from gptmill.data.pipeline.encoding import EncodingOptions, encode_chunk, encode_pieces, load_worker, read_clean
from gptmill.data.pipeline.executors import Workers, count_cores, map_in_order, open_executor
from gptmill.data.pipeline.journal import FILE_NAME as JOURNAL_NAME
from gptmill.data.pipeline.journal import Journal, read_journal
from gptmill.data.pipeline.prepare_job import PrepareJob
from gptmill.data.pipeline.prepare_progress import PrepareProgress, Report
from gptmill.data.pipeline.shard_writer import ShardWriter
from gptmill.data.pipeline.size_checks import check_sizes
from gptmill.data.pipeline.split_checks import check_splits
from gptmill.data.pipeline.splitting import write_chunk
from gptmill.data.shards.shard_manifest import (
    DOCUMENTS_DIR,
    ORIGINS_DIR,
    Manifest,
    write_manifest,
    write_names,
)
from gptmill.data.sources import SourceFile
from gptmill.data.tokenizers import Tokenizer, build_tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import choose_dtype, make_fingerprint

DUPLICATES_NAME = "duplicates.sqlite"
JOURNAL_SECONDS = 2.0
INLINE_BYTES = 8 * 2**20  # a smaller corpus is encoded faster than a process pool starts


def write_corpus(folder: Path, job: PrepareJob, report: Report) -> Manifest:
    """Writes the corpus into `folder`, its manifest last; resumes an earlier attempt at the same job."""
    journal = read_journal(folder, job.origin)
    if journal is None:
        _clear(folder)
        journal = Journal(job.origin, val_limit=job.val_limit)
    request = job.request
    is_small = 0 < job.size_bytes <= INLINE_BYTES
    processes = request.processes or (1 if is_small else count_cores())
    plugins = name_reloadable(ReadingPartOptions.kinds)
    if plugins is None:
        processes = 1  # other processes would not know the parts that this one has registered
    with open_executor(processes, request.cluster, load_worker, plugins) as workers:
        tokenizer = _build_tokenizer(folder, job, journal)
        if journal.chunks == 0:
            check_sizes(folder, job, tokenizer)
        _encode_all(folder, job, tokenizer, journal, workers, report)
        if job.draws_documents and job.has_val and (raised := journal.find_raised_limit()):
            # Validation is too small: start over with a higher limit, which adds the documents with the lowest draws.
            (folder / JOURNAL_NAME).unlink(missing_ok=True)
            _clear(folder)
            journal = Journal(job.origin, tokenizer.spec(), val_limit=raised)
            _encode_all(folder, job, tokenizer, journal, workers, report)
    return _finish(folder, job, tokenizer, journal)


def _clear(folder: Path) -> None:
    """Deletes everything but the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def _build_tokenizer(folder: Path, job: PrepareJob, journal: Journal) -> Tokenizer:
    if journal.tokenizer is not None:
        return restore_tokenizer(journal.tokenizer, f"{folder / JOURNAL_NAME}")
    request = job.request
    chunks = make_chunks(job.files, request.reading, START)
    tokenizer = build_tokenizer(request.tokenizer, read_clean(chunks, request.reading, request.cleaning))
    journal.tokenizer = tokenizer.spec()
    return tokenizer


def _encode_all(
    folder: Path, job: PrepareJob, tokenizer: Tokenizer, journal: Journal, workers: Workers, report: Report
) -> None:
    """Encodes and writes the rest of the corpus, from the position in the journal on."""
    request = job.request
    for name in (DOCUMENTS_DIR, ORIGINS_DIR):
        (folder / name).mkdir(exist_ok=True)
    options = EncodingOptions(
        tokenizer.spec(),
        make_fingerprint(tokenizer),
        request.reading,
        request.cleaning,
        job.first_val_file,
        job.tail_fraction,
    )
    dtype = choose_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(closing(ShardWriter(folder, name, dtype, request.shard_tokens, state)))
            for name, state in (("train", journal.train), ("val", journal.val))
        ]
        index = DuplicateIndex(folder / DUPLICATES_NAME, request.cleaning, journal.chunks)
        stack.enter_context(closing(index))
        chunks = make_chunks(job.files, request.reading, journal.position)
        make_progress = partial(_make_progress, job, journal, journal.source_bytes, journal.text_bytes)
        saved = time.monotonic()
        for chunk, encoded in map_in_order(partial(encode_chunk, options=options), chunks, workers):
            write_chunk(encoded, journal, writers, index)
            if not encoded.is_complete:  # a small file that decompresses to a large one: encode the rest here
                for piece in encode_pieces(chunk, options, len(encoded.documents)):
                    write_chunk(piece, journal, writers, index)
            journal.advance(chunk)
            journal.defects.check_limit(request.reading.max_errors)
            report(make_progress())
            if time.monotonic() - saved >= JOURNAL_SECONDS:
                _save(folder, journal, writers, index)
                saved = time.monotonic()
        for writer in writers:
            writer.finish()


def _save(folder: Path, journal: Journal, writers: list[ShardWriter], index: DuplicateIndex) -> None:
    """Makes the shards and the index durable before the journal, which refers to them."""
    for writer in writers:
        writer.flush()
    index.commit()
    journal.save(folder)


def _make_progress(job: PrepareJob, journal: Journal, resumed_bytes: int, resumed_text_bytes: int) -> PrepareProgress:
    return PrepareProgress(
        bytes_done=journal.source_bytes,
        bytes_total=job.size_bytes,
        text_bytes=journal.text_bytes,
        tokens=journal.train.tokens + journal.val.tokens,
        resumed_bytes=resumed_bytes,
        resumed_text_bytes=resumed_text_bytes,
        is_done=journal.position == Position(len(job.files), 0),
    )


def _finish(folder: Path, job: PrepareJob, tokenizer: Tokenizer, journal: Journal) -> Manifest:
    _check_unchanged(job.files)
    check_splits(job, journal)
    names_sha256 = write_names(folder, [file.name for file in job.files])
    manifest = Manifest(
        choose_dtype(tokenizer.vocab_size).name,
        tokenizer.spec(),
        make_fingerprint(tokenizer),
        job.origin,
        journal.report.to_json(),
        journal.train.make_split(),
        journal.val.make_split(),
        journal.defects.to_json(),
        names_sha256,
    )
    write_manifest(folder, manifest)
    return manifest


def _check_unchanged(files: tuple[SourceFile, ...]) -> None:
    """Raises UserError if a file changed during the preparation: the shards would mix both versions."""
    for file in files:
        if file.mtime_ns and (path := Path(file.uri)).is_file():
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                raise UserError(f"{path} changed while it was being prepared; run the same command again")


def remove_temporary_files(folder: Path) -> None:
    """Deletes the journal and the deduplication index of a finished corpus."""
    for path in folder.iterdir():
        if path.name == JOURNAL_NAME or path.name.startswith(DUPLICATES_NAME):
            path.unlink()
