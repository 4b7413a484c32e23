"""Sequences on the device, of which batches are cut there: the host sends each token once, and waits for nothing.

Shape suffixes: B rows, T tokens, K scored tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gptmill.evals.length_batches import LengthBatch
from gptmill.evals.request_encoding import Sequences


class ScoredBatch(NamedTuple):
    """A batch of tokens, and for each scored token: its id, the position that predicts it, its place in the results."""

    tokens_BT: Tensor
    positions_K: Tensor
    targets_K: Tensor
    places_K: Tensor


class SequenceTable:
    """The results have a place for every scored token, in the order of the sequences."""

    def __init__(self, sequences: Sequences, batches: Sequence[LengthBatch], device: torch.device) -> None:
        self._batches = batches
        self._scored = sequences.scored
        lengths = np.fromiter(map(len, sequences.ids), dtype=np.int64, count=len(sequences.ids))
        starts, places = (np.cumsum(sizes) - sizes for sizes in (lengths, self._scored))
        self._ids = _send(np.concatenate(sequences.ids).astype(np.int64, copy=False), device)
        self._columns = _send(np.stack([starts, lengths, self._scored, places]), device)
        self._members = _send(np.concatenate([batch.members for batch in batches]), device)
        self._first = np.cumsum([0, *(len(batch.members) for batch in batches)])

    def cut(self, number: int) -> ScoredBatch:
        """The batch of that number. Sequences are filled up with zeros, and batches with rows of them."""
        batch, ids = self._batches[number], self._ids
        own = slice(int(self._first[number]), int(self._first[number + 1]))
        starts_B, lengths_B, counts_B, places_B = self._columns[:, self._members[own]]
        columns_T = torch.arange(batch.width, device=ids.device)
        # Nothing is predicted from the last token, so it is left out.
        is_inside_BT = columns_T < lengths_B[:, None] - 1
        tokens_BT = torch.where(is_inside_BT, ids[(starts_B[:, None] + columns_T).clamp(max=len(ids) - 1)], 0)
        num_scored = int(self._scored[batch.members].sum())
        rows_K = torch.arange(len(starts_B), device=ids.device).repeat_interleave(counts_B, output_size=num_scored)
        numbers_K = torch.arange(num_scored, device=ids.device) - (counts_B.cumsum(0) - counts_B)[rows_K]
        columns_K = (lengths_B - counts_B)[rows_K] + numbers_K
        return ScoredBatch(
            F.pad(tokens_BT, (0, 0, 0, batch.height - len(starts_B))),
            rows_K * batch.width + columns_K - 1,
            ids[starts_B[rows_K] + columns_K],
            places_B[rows_K] + numbers_K,
        )


def _send(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """To the device, without waiting for the work that it still has to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
