"""BatchStream: the batches of one split as an iterator whose whole state is one number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, Self

from gptmill.config.errors import UserError
from gptmill.data.batches.batch import Batch, make_batch
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.batches.order import Order, ShardOrder, Shuffle
from gptmill.data.batches.row_reader import HostReader
from gptmill.data.batches.samplers import WindowSampler
from gptmill.data.shards.opening import SplitWindows
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import TokenArray

BatchOrder = Literal["shuffle", "shards", "sequential"]
IGNORED_TARGET = -100  # windows are full, so that no target ever is


class BatchStream:
    """Endless batches of windows, epoch after epoch, in the order of a training run with the same seed."""

    def __init__(
        self,
        arrays: Sequence[TokenArray],
        tokenizer: Tokenizer,
        batch_size: int,
        context_length: int,
        seed: int,
        order: BatchOrder,
        position: int,
    ) -> None:
        windows = SplitWindows(arrays, context_length)
        if windows.num_windows == 0:
            raise UserError(
                f"the split has {windows.lengths.max(initial=0):,} tokens in a shard, less than one window of "
                f"context_length + 1 = {context_length + 1:,}"
            )
        self.position = position
        """Windows read so far; set it to go on from there."""
        self.windows_per_epoch = windows.num_windows
        orders: dict[BatchOrder, Order] = {
            "shuffle": Shuffle(windows.num_windows, seed),
            "shards": ShardOrder(windows.counts, seed),
            "sequential": ShardOrder(windows.counts),
        }
        self._sampler = WindowSampler([windows], [orders[order]], MixtureWeights((Fraction(1),)), batch_size)
        self._reader = HostReader([arrays], tokenizer.end_of_text, tokenizer.vocab_size)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        rows = self._reader.read(self._sampler.find(self.position))
        self.position += self._sampler.samples_per_batch
        return make_batch(rows, IGNORED_TARGET)

    def state_dict(self) -> dict[str, int]:
        """What to save beside a model, to read on from here later."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
