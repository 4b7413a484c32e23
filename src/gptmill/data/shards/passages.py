"""Stretches of a corpus for people: which documents stand there, where they came from, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from gptmill.config.errors import UserError
from gptmill.data.shards.arrays import IndexArray
from gptmill.data.shards.opening import TokenShards
from gptmill.data.shards.shard_manifest import NAMES_NAME, ORIGINS_DIR, Split
from gptmill.data.tokenizers.protocol import decode


@dataclass(frozen=True)
class Extract:
    """What a stretch holds of one document."""

    document: int
    origin: str | None
    is_opening: bool
    text: str


class SplitReader:
    """One split of a corpus, by shard and place."""

    def __init__(self, shards: TokenShards, split: str) -> None:
        self.shards = shards
        self.split = split
        self.tokens = shards.train if split == "train" else shards.val
        self._starts = shards.train_starts if split == "train" else shards.val_starts
        self._manifest: Split = getattr(shards.manifest, split)

    def read(self, shard: int, start: int, length: int) -> list[Extract]:
        """The documents of `length` tokens from a place in a shard on, in their order."""
        starts = self._starts[shard]
        first = int(np.searchsorted(starts, start, side="right")) - 1
        cuts = [start, *(int(cut) for cut in starts[first + 1 :] if cut < start + length), start + length]
        tokens = self.tokens[shard]
        return [
            Extract(
                max(0, self._firsts[shard] + first + number),
                self._find_origin(shard, first + number),
                bool(first + number >= 0 and starts[first + number] == begin),
                decode(self.shards.tokenizer, tokens[begin:end].tolist()),
            )
            for number, (begin, end) in enumerate(pairwise(cuts))
        ]

    @cached_property
    def _firsts(self) -> list[int]:
        """Documents that start before each shard."""
        counts = [len(self._starts[number]) for number in range(len(self.tokens))]
        return [0, *np.cumsum(counts)[:-1].tolist()]

    @cached_property
    def _names(self) -> list[str]:
        path = self.shards.folder / ORIGINS_DIR / NAMES_NAME
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def _find_origin(self, shard: int, number: int) -> str | None:
        """The source file of a document; of one that began in an earlier shard, the last that started there."""
        while number < 0 and shard > 0:
            shard -= 1
            number += len(self._starts[shard])
        path = self.shards.folder / ORIGINS_DIR / self._manifest.shards[shard].file
        if not self._names or not path.exists() or number < 0:
            return None
        origins: IndexArray = np.load(path, mmap_mode="r", allow_pickle=False)
        return self._names[int(origins[number])]


def read_windows(
    shards: TokenShards, split: str, context_length: int, first: int, count: int
) -> Iterator[list[Extract]]:
    """Windows as they are stored; raises UserError for one that does not exist."""
    reader = SplitReader(shards, split)
    windows = shards.cut(reader.tokens, context_length)
    if not 0 <= first < windows.num_windows:
        raise UserError(
            f"the {split} split of {shards.location} has windows 0 to {windows.num_windows - 1:,} of "
            f"{context_length:,} tokens, and none of number {first:,}; give a smaller --window or --context_length"
        )
    chosen = np.arange(first, min(first + count, windows.num_windows), dtype=np.int64)
    for shard, start in zip(*windows.locate(chosen), strict=True):
        yield reader.read(int(shard), int(start), context_length)
