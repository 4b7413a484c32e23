"""Token rows: their locations in the shards, and reading them from there into host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.shards.arrays import IndexArray, LazyArrays
from gptmill.data.tokenizers.protocol import TokenArray


@dataclass(frozen=True)
class RowLocations:
    """Where each row of a batch starts. A row has `lengths` tokens, or `width` if `lengths` is None."""

    corpora: IndexArray
    shards: IndexArray
    starts: IndexArray
    width: int
    lengths: IndexArray | None = None


@dataclass(frozen=True)
class Rows:
    """`width` + 1 tokens per row: the inputs and the token after them. Tokens beyond a row's length are padding.

    `corpora` holds the index of each row's corpus, if there are several.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    corpora: Tensor | None = None

    def to(self, device: torch.device) -> Rows:
        """Moves the rows to the device; to a GPU asynchronously, through pinned memory."""
        if self.tokens.device.type == device.type:
            return self
        if device.type == "cuda":
            return self._map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
        return self._map(lambda tensor: tensor.to(device))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the allocator from reusing the memory before `stream` is done with it."""
        for tensor in (self.tokens, self.lengths, self.corpora):
            if tensor is not None:
                tensor.record_stream(stream)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Rows:
        lengths = None if self.lengths is None else move(self.lengths)
        return Rows(move(self.tokens), lengths, None if self.corpora is None else move(self.corpora))


class Reader(Protocol):
    """Reads rows at locations."""

    def read(self, locations: RowLocations) -> Rows: ...

    def prefetch(self, upcoming: list[list[int]]) -> None:
        """Announces which shards of each corpus are read next."""
        ...


@dataclass(frozen=True)
class HostReader:
    """Reads rows from memory maps. A row that ends with its shard is followed by end_of_text."""

    arrays: Sequence[Sequence[TokenArray]]
    end_of_text: int
    vocab_size: int

    def read(self, locations: RowLocations) -> Rows:
        tokens = np.full((len(locations.starts), locations.width + 1), self.end_of_text, dtype=np.int64)
        lengths = np.full(len(tokens), locations.width) if locations.lengths is None else locations.lengths
        # In shard order, so that each shard is opened once.
        for row in np.lexsort((locations.shards, locations.corpora)):
            start = locations.starts[row]
            array = self.arrays[locations.corpora[row]][int(locations.shards[row])]
            piece = array[start : start + lengths[row] + 1]
            tokens[row, : len(piece)] = piece
        if tokens.max() >= self.vocab_size:
            raise self._make_error(locations, tokens)
        return Rows(torch.from_numpy(tokens), *make_row_tensors(locations, len(self.arrays)))

    def _make_error(self, locations: RowLocations, tokens: NDArray[np.int64]) -> UserError:
        row, column = np.argwhere(tokens >= self.vocab_size)[0]
        arrays, shard = self.arrays[locations.corpora[row]], int(locations.shards[row])
        name = arrays.names[shard] if isinstance(arrays, LazyArrays) else f"shard {shard}"
        position = int(locations.starts[row] + column)
        return make_vocabulary_error(f"{name} at position {position:,}", int(tokens[row, column]), self.vocab_size)

    def prefetch(self, upcoming: list[list[int]]) -> None:
        for arrays, shards in zip(self.arrays, upcoming, strict=True):
            fetch = getattr(arrays, "prefetch", None)  # only remote shards have it
            if fetch is not None and shards:
                fetch(shards)


def make_row_tensors(locations: RowLocations, num_corpora: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns the rows' lengths, if given, and their corpora, if several, as host tensors."""
    lengths = None if locations.lengths is None else torch.from_numpy(locations.lengths)
    return lengths, torch.from_numpy(locations.corpora) if num_corpora > 1 else None


def make_vocabulary_error(where: str, token: int, vocab_size: int) -> UserError:
    return UserError(
        f"{where} holds token {token}, outside the vocabulary of {vocab_size}; prepare the corpus again, or pass the "
        f"tokenizer that it was made with as --tokenizer"
    )
