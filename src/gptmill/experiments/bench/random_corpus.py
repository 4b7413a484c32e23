"""A corpus of random tokens, for measuring speed without data."""

from __future__ import annotations

import math
import string
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptmill.data.pipeline.shard_writer import ShardWriter, WriterState
from gptmill.data.shards.shard_manifest import DOCUMENTS_DIR, ORIGINS_DIR, Manifest, write_manifest, write_names
from gptmill.data.tokenizers import build_tokenizer
from gptmill.data.tokenizers.protocol import choose_dtype, make_fingerprint

NAME = "random tokens"
SHARD_TOKENS = 100_000_000
DOCUMENT_TOKENS = 1_000


def write_random_corpus(folder: Path, tokenizer_name: str, train_tokens: int, val_tokens: int) -> None:
    """Writes shards in this tokenizer's vocabulary; a tokenizer to be trained gets the printable characters."""
    tokenizer = build_tokenizer(tokenizer_name, [string.printable])
    dtype = choose_dtype(tokenizer.vocab_size)
    for path in (folder / DOCUMENTS_DIR, folder / ORIGINS_DIR):
        path.mkdir(parents=True)
    generator, splits = np.random.default_rng(0), {}
    for split, tokens in (("train", train_tokens), ("val", val_tokens)):
        state = WriterState()
        with closing(ShardWriter(folder, split, dtype, SHARD_TOKENS, state)) as writer:
            for first in range(0, tokens, SHARD_TOKENS):
                count = min(SHARD_TOKENS, tokens - first)
                sampled = sample_tokens(generator, count, tokenizer.vocab_size).astype(dtype)
                bounds = np.append(np.arange(0, count, DOCUMENT_TOKENS), count)
                sampled[bounds[:-1]] = tokenizer.end_of_text
                writer.write_run(sampled, bounds, [0] * (len(bounds) - 1))
            writer.finish()
        splits[split] = state.make_split()
    names_sha256 = write_names(folder, [NAME])
    identity = (dtype.name, tokenizer.spec(), make_fingerprint(tokenizer), {"name": NAME})
    write_manifest(folder, Manifest(*identity, {}, splits["train"], splits["val"], names_sha256=names_sha256))


def sample_tokens(generator: np.random.Generator, count: int, vocab_size: int) -> NDArray[np.int64]:
    """Samples by Zipf's law, the k-th token with probability about 1/k: it affects the embedding gradient's speed."""
    sampled = np.exp(generator.random(count) * math.log(vocab_size + 1)).astype(np.int64) - 1
    return np.minimum(sampled, vocab_size - 1)
