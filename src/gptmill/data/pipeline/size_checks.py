"""Checks the disk space and the number of shards of a corpus, by an estimate, before anything is written."""

from __future__ import annotations

import math
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
MAX_SHARDS = 10_000  # three files each
MIN_SHARD_TOKENS = 100_000  # for a source of unknown size


def check_sizes(folder: Path, job: PrepareJob, tokenizer: Tokenizer) -> None:
    """Raises UserError if the shards would not fit on the disk of `folder`, or would be too many."""
    tokens = _estimate_tokens(job, tokenizer)
    least = math.ceil(tokens / MAX_SHARDS) if job.size_bytes else MIN_SHARD_TOKENS
    if job.request.shard_tokens < least:
        amount = f"about {tokens / job.request.shard_tokens:,.0f} files" if job.size_bytes else "too many files"
        advice = f"give at least {_round_up(least):,}, or leave it out"
        raise UserError(f"--shard_tokens {job.request.shard_tokens} would write {amount}; {advice}")
    needed = tokens * choose_dtype(tokenizer.vocab_size).itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the shards need about {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free at {folder.parent}; "
            f"free disk space or choose another --out"
        )


def _estimate_tokens(job: PrepareJob, tokenizer: Tokenizer) -> float:
    """Estimates the number of tokens from the stored sizes and the compression ratio of the first document."""
    request = job.request
    stored = sum(file.size_bytes * EXPANSION.get(PurePath(file.name).suffix, 1.0) for file in job.files)
    texts = read_clean(make_chunks(job.files, request.reading, START), request.reading, request.cleaning)
    probe = next(texts, "")[:PROBE_CHARS]
    return stored * len(tokenizer.encode(probe)) / max(1, len(probe.encode("utf-8")))


def _round_up(tokens: int) -> int:
    """Rounds up to one significant digit: the number is an estimate."""
    unit = int(10 ** (len(str(tokens)) - 1))
    return math.ceil(tokens / unit) * unit
