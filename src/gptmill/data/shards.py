"""TokenShards: a prepared corpus, opened. Memory maps only; nothing is read until a window is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.data.manifest import FILE_NAME as MANIFEST_NAME
from gptmill.data.manifest import Manifest, Split, read_manifest
from gptmill.data.order import IndexArray
from gptmill.data.tokenizers import Tokenizer, restore_tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, check_fingerprint, make_fingerprint


@dataclass(frozen=True)
class SplitWindows:
    """A split cut into windows of `context_length` tokens, each with the token that follows it."""

    arrays: tuple[TokenArray, ...]
    context_length: int
    vocab_size: int

    @cached_property
    def counts(self) -> IndexArray:
        """Windows in each shard; a last piece shorter than a window is left over."""
        return np.array([max(0, (len(array) - 1) // self.context_length) for array in self.arrays], dtype=np.int64)

    @cached_property
    def num_windows(self) -> int:
        return int(self.counts.sum())

    def read(self, windows: IndexArray) -> NDArray[np.int64]:
        """The tokens of windows by number, context_length + 1 of each."""
        ends = np.cumsum(self.counts)
        shards = np.searchsorted(ends, windows, side="right")
        starts = (windows - (ends - self.counts)[shards]) * self.context_length
        rows = np.empty((len(windows), self.context_length + 1), dtype=np.int64)
        for row, shard, start in zip(rows, shards, starts, strict=True):
            row[:] = self.arrays[shard][start : start + self.context_length + 1]
        if rows.max() >= self.vocab_size:
            raise UserError(
                f"the shards hold token {rows.max()}, outside the vocabulary of {self.vocab_size}; "
                f"prepare the corpus again"
            )
        return rows


@dataclass(frozen=True)
class TokenShards:
    """Manifest, memory maps and tokenizer of one corpus."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: tuple[TokenArray, ...]
    val: tuple[TokenArray, ...]

    def cut(self, arrays: tuple[TokenArray, ...], context_length: int) -> SplitWindows:
        return SplitWindows(arrays, context_length, self.tokenizer.vocab_size)


def open_shards(folder: Path, expected_tokenizer: str | None = None) -> TokenShards:
    """Opens a prepared corpus, refusing one that is incomplete or made with another tokenizer."""
    manifest = read_manifest(folder)
    tokenizer = restore_tokenizer(manifest.tokenizer, f"{folder / MANIFEST_NAME}")
    if expected_tokenizer is not None and tokenizer.name != expected_tokenizer:
        raise UserError(
            f"tokenizer mismatch: the run asks for {expected_tokenizer}, but {folder} was prepared with "
            f"{manifest.fingerprint}; prepare it with --tokenizer {expected_tokenizer}, "
            f"or train with --tokenizer {tokenizer.name}"
        )
    check_fingerprint(manifest.fingerprint, make_fingerprint(tokenizer), f"corpus {folder}")
    arrays = {name: _open_split(folder, getattr(manifest, name), manifest.dtype) for name in ("train", "val")}
    return TokenShards(folder, manifest, tokenizer, **arrays)


def _open_split(folder: Path, split: Split, dtype: str) -> tuple[TokenArray, ...]:
    return tuple(_open_array(folder / shard.file, shard.tokens, dtype) for shard in split.shards)


def _open_array(path: Path, tokens: int, dtype: str) -> TokenArray:
    again = "prepare the corpus again with --overwrite"
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"cannot read shard {path}: {error.strerror or error}; {again}") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"shard {path} is damaged ({error}); {again}") from None
    if array.shape != (tokens,) or array.dtype != np.dtype(dtype):
        found = f"{array.dtype} {array.shape}"
        raise UserError(f"shard {path} holds {found}, the manifest says {dtype} ({tokens},); {again}")
    return array
