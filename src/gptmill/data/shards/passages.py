"""Passages of a corpus as readable text: which documents a token range contains, and their source files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.files import hash_file
from gptmill.data.shards.arrays import find_array
from gptmill.data.shards.opening import TokenShards
from gptmill.data.shards.shard_manifest import ORIGINS_DIR, Split, read_names
from gptmill.data.tokenizers.protocol import decode


@dataclass(frozen=True)
class Extract:
    """The part of one document that a token range contains."""

    document: int
    origin: str | None
    is_opening: bool
    text: str


class SplitReader:
    """Reads token ranges of one split as text."""

    def __init__(self, shards: TokenShards, split: str) -> None:
        self.shards = shards
        self.split = split
        self.tokens = shards.train if split == "train" else shards.val
        self._starts = shards.train_starts if split == "train" else shards.val_starts
        self._manifest: Split = getattr(shards.manifest, split)
        self._origins: dict[int, NDArray[Any]] = {}

    def read(self, shard: int, start: int, length: int) -> list[Extract]:
        """Returns the documents in `length` tokens from position `start` of a shard on, in order."""
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
        """The number of documents that start before each shard."""
        counts = [len(self._starts[number]) for number in range(len(self.tokens))]
        return [0, *np.cumsum(counts)[:-1].tolist()]

    @cached_property
    def _names(self) -> list[str]:
        return read_names(self.shards.folder, self.shards.manifest.names_sha256)

    def _find_origin(self, shard: int, number: int) -> str | None:
        """Returns the source file of a document; a negative number counts back into earlier shards."""
        while number < 0 and shard > 0:
            shard -= 1
            number += len(self._starts[shard])
        described = self._manifest.shards[shard]
        path = self.shards.folder / ORIGINS_DIR / described.file
        if not self._names or not path.exists() or number < 0:
            return None
        with _report_damage(path):
            if shard not in self._origins:
                _check_sha256(path, described.origins_sha256)
                self._origins[shard] = find_array(path).map()
            return self._names[int(self._origins[shard][number])]


def _check_sha256(path: Path, expected: str) -> None:
    if expected and hash_file(path) != expected:
        raise ValueError("its SHA-256 differs from the manifest's")


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the corpus again with --overwrite") from None


def read_windows(
    shards: TokenShards, split: str, context_length: int, first: int, count: int
) -> Iterator[list[Extract]]:
    """Yields windows in stored order; raises UserError if the first does not exist."""
    reader = SplitReader(shards, split)
    windows = shards.cut(reader.tokens, context_length)
    if windows.num_windows == 0:
        raise UserError(
            f"the {split} split of {shards.location} has no window of {context_length:,} tokens; choose a smaller "
            f"--context_length"
        )
    if not 0 <= first < windows.num_windows:
        raise UserError(
            f"the {split} split of {shards.location} has no window {first:,}, only 0 to {windows.num_windows - 1:,} of "
            f"{context_length:,} tokens; choose another --window"
        )
    chosen = np.arange(first, min(first + count, windows.num_windows), dtype=np.int64)
    for shard, start in zip(*windows.locate(chosen), strict=True):
        yield reader.read(int(shard), int(start), context_length)
