"""Whether the disk has room for a corpus, estimated before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePath

from gptmill.config.errors import UserError
from gptmill.data.pipeline.chunks import START, make_chunks
from gptmill.data.pipeline.encoding import read_clean
from gptmill.data.pipeline.opened import OpenedCorpus
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import choose_dtype

# How many bytes of text a stored byte usually is. Low guesses: a wrong alarm would stop what would have fitted.
EXPANSION = {".gz": 2.5, ".xz": 3.0, ".zst": 2.5, ".bz2": 3.0, ".parquet": 1.5}
PROBE_CHARS = 65_536


def check_disk_space(folder: Path, corpus: OpenedCorpus, tokenizer: Tokenizer) -> None:
    """Raises UserError where the shards would not fit."""
    needed = _estimate_bytes(corpus, tokenizer)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the shards need about {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free at {folder.parent}; "
            f"make room or choose another --out"
        )


def _estimate_bytes(corpus: OpenedCorpus, tokenizer: Tokenizer) -> float:
    """From the stored sizes, and what the first document becomes."""
    request = corpus.request
    stored = sum(file.size_bytes * EXPANSION.get(PurePath(file.name).suffix, 1.0) for file in corpus.files)
    texts = read_clean(make_chunks(corpus.files, request.reading, START), request.reading, request.cleaning)
    probe = next(texts, "")[:PROBE_CHARS]
    tokens = len(tokenizer.encode(probe)) * choose_dtype(tokenizer.vocab_size).itemsize
    return stored * tokens / max(1, len(probe.encode("utf-8")))
