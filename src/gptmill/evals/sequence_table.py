"""Rows of tokens on the device, of which batches are cut there: the host sends each token once, and waits for nothing.

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
from gptmill.evals.token_rows import TokenRows
from gptmill.models.masks import Branches


class ScoredBatch(NamedTuple):
    """A batch of tokens, and for each scored token: its id, the position that predicts it, its place in the results."""

    tokens_BT: Tensor
    branches: Branches | None
    """Where rows have several continuations."""
    positions_K: Tensor
    targets_K: Tensor
    places_K: Tensor


class SequenceTable:
    """The results have a place for every scored token, in the order of the requests."""

    def __init__(self, rows: TokenRows, batches: Sequence[LengthBatch], device: torch.device) -> None:
        self._batches = batches
        self._num_scored = rows.scored
        starts, places = (np.cumsum(sizes) - sizes for sizes in (rows.lengths, rows.scored))
        kinds = [rows.ids, rows.positions, rows.branches] if rows.has_branches else [rows.ids]
        self._tokens = _send(np.stack(kinds), device)
        self._scored = _send(np.stack([rows.columns, rows.targets]), device)
        self._rows = _send(np.stack([starts, rows.lengths, rows.scored, places]), device)
        self._members = _send(np.concatenate([batch.members for batch in batches]), device)
        self._ends = np.cumsum([len(batch.members) for batch in batches])

    def cut(self, number: int) -> ScoredBatch:
        """The batch of that number. Rows are filled up with zeros, and batches with rows of them."""
        batch, device = self._batches[number], self._rows.device
        end = int(self._ends[number])
        starts_B, lengths_B, counts_B, places_B = self._rows[:, self._members[end - len(batch.members) : end]]
        columns_T = torch.arange(batch.width, device=device)
        places_BT = (starts_B[:, None] + columns_T).clamp(max=self._tokens.shape[1] - 1)
        tokens = torch.where(columns_T < lengths_B[:, None], self._tokens[:, places_BT], 0)
        tokens_BT, *others = F.pad(tokens, (0, 0, 0, batch.height - len(starts_B)))
        num_scored = int(self._num_scored[batch.members].sum())
        rows_K = torch.arange(len(starts_B), device=device).repeat_interleave(counts_B, output_size=num_scored)
        shifts_B = places_B - (counts_B.cumsum(0) - counts_B)
        places_K = torch.arange(num_scored, device=device) + shifts_B[rows_K]
        columns_K, targets_K = self._scored[:, places_K]
        branches = Branches(*others) if others else None
        return ScoredBatch(tokens_BT, branches, rows_K * batch.width + columns_K, targets_K, places_K)


def _send(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """To the device, without waiting for the work that it still has to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
