"""Checks that the disk has enough free space for a corpus, by an estimate, before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePath

from gptmill.config.errors import UserError
from gptmill.data.pipeline.chunks import START, make_chunks
from gptmill.data.pipeline.encoding import read_clean
from gptmill.data.pipeline.prepare_job import PrepareJob
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import choose_dtype

# Typical bytes of text per stored byte. Deliberately low: an overestimate would refuse a corpus that fits.
EXPANSION = {".gz": 2.5, ".xz": 3.0, ".zst": 2.5, ".bz2": 3.0, ".parquet": 1.5}
PROBE_CHARS = 65_536


def check_disk_space(folder: Path, job: PrepareJob, tokenizer: Tokenizer) -> None:
    """Raises UserError if the shards would not fit on the disk of `folder`."""
    needed = _estimate_bytes(job, tokenizer)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the shards need about {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free at {folder.parent}; "
            f"free disk space or choose another --out"
        )


def _estimate_bytes(job: PrepareJob, tokenizer: Tokenizer) -> float:
    """Estimates the size of the shards from the stored sizes and the compression ratio of the first document."""
    request = job.request
    stored = sum(file.size_bytes * EXPANSION.get(PurePath(file.name).suffix, 1.0) for file in job.files)
    texts = read_clean(make_chunks(job.files, request.reading, START), request.reading, request.cleaning)
    probe = next(texts, "")[:PROBE_CHARS]
    tokens = len(tokenizer.encode(probe)) * choose_dtype(tokenizer.vocab_size).itemsize
    return stored * tokens / max(1, len(probe.encode("utf-8")))
