"""Texts to the shard files of one split."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gptmill.data.files import flush_to_disk, hash_file
from gptmill.data.manifest import DOCUMENTS_DIR, Shard, Split
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype


class ShardWriter:
    """Gathers documents into shards of a fixed number of tokens."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self.tokens = 0
        self._folder = folder
        self._split = split
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._dtype = choose_dtype(tokenizer.vocab_size)
        self._documents = 0
        self._starts: list[int] = []
        self._pending: list[TokenArray] = []
        self._pending_tokens = 0
        self._shards: list[Shard] = []

    def write(self, text: str) -> None:
        opening = np.array([self._tokenizer.end_of_text], dtype=self._dtype)
        ids = np.concatenate([opening, self._tokenizer.encode(text)])
        self._documents += 1
        self._starts.append(self._pending_tokens)
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
        flush_to_disk(path)
        starts = self._folder / DOCUMENTS_DIR / path.name
        np.save(starts, np.array(self._starts, dtype=np.int64))
        flush_to_disk(starts)
        self._shards.append(
            Shard(path.name, self._pending_tokens, hash_file(path), len(self._starts), hash_file(starts))
        )
        self._pending, self._pending_tokens, self._starts = [], 0, []
