"""Rows of tokens: where they stand in the shards, and reading them from there into the memory of the host."""

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
    """Where each row of a batch begins; a row has `lengths` tokens, or `width` where there are none given."""

    corpora: IndexArray
    shards: IndexArray
    starts: IndexArray
    width: int
    lengths: IndexArray | None = None


@dataclass(frozen=True)
class Rows:
    """Tokens as they were read, `width` and the one after them in each row; what is past a row's length is padding.

    `corpora` holds the number of each row's corpus, where there are several.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    corpora: Tensor | None = None

    def to(self, device: torch.device) -> Rows:
        """On the device; to a GPU through pinned memory, so that nothing waits for the copy."""
        if self.tokens.device.type == device.type:
            return self
        if device.type == "cuda":
            return self._map(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
        return self._map(lambda tensor: tensor.to(device))

    def hand_over(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory from being used again before `stream` is done with it."""
        for tensor in (self.tokens, self.lengths, self.corpora):
            if tensor is not None:
                tensor.record_stream(stream)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        lengths = None if self.lengths is None else change(self.lengths)
        return Rows(change(self.tokens), lengths, None if self.corpora is None else change(self.corpora))


class Reader(Protocol):
    """Turns places into rows, which name their corpora where it reads several."""

    def read(self, places: RowLocations) -> Rows: ...

    def prefetch(self, upcoming: list[list[int]]) -> None:
        """Told which shards of each corpus come next."""
        ...


@dataclass(frozen=True)
class HostReader:
    """Reads rows from memory maps. Where a row ends with its shard, end_of_text follows it."""

    arrays: Sequence[Sequence[TokenArray]]
    end_of_text: int
    vocab_size: int

    def read(self, places: RowLocations) -> Rows:
        tokens = np.full((len(places.starts), places.width + 1), self.end_of_text, dtype=np.int64)
        lengths = np.full(len(tokens), places.width) if places.lengths is None else places.lengths
        # Shard by shard, so that each has to be opened once.
        for row in np.lexsort((places.shards, places.corpora)):
            start = places.starts[row]
            array = self.arrays[places.corpora[row]][int(places.shards[row])]
            piece = array[start : start + lengths[row] + 1]
            tokens[row, : len(piece)] = piece
        if tokens.max() >= self.vocab_size:
            self._refuse(places, tokens)
        return Rows(torch.from_numpy(tokens), *describe_locations(places, len(self.arrays)))

    def _refuse(self, places: RowLocations, tokens: NDArray[np.int64]) -> None:
        row, column = np.argwhere(tokens >= self.vocab_size)[0]
        arrays, shard = self.arrays[places.corpora[row]], int(places.shards[row])
        name = arrays.names[shard] if isinstance(arrays, LazyArrays) else f"shard {shard}"
        place = int(places.starts[row] + column)
        raise make_vocabulary_error(f"{name} at place {place:,}", int(tokens[row, column]), self.vocab_size)

    def prefetch(self, upcoming: list[list[int]]) -> None:
        for arrays, shards in zip(self.arrays, upcoming, strict=True):
            fetch = getattr(arrays, "prefetch", None)  # only shards that come from elsewhere have it
            if fetch is not None and shards:
                fetch(shards)


def describe_locations(places: RowLocations, num_corpora: int) -> tuple[Tensor | None, Tensor | None]:
    """The lengths and the corpora that rows carry along, on the host."""
    lengths = None if places.lengths is None else torch.from_numpy(places.lengths)
    return lengths, torch.from_numpy(places.corpora) if num_corpora > 1 else None


def make_vocabulary_error(where: str, token: int, vocab_size: int) -> UserError:
    """Of a token that no model of this vocabulary can be fed."""
    return UserError(
        f"{where} holds token {token}, outside the vocabulary of {vocab_size}; prepare the corpus again, or name the "
        f"tokenizer that it was made with"
    )
