"""On-device dataset: all training tokens in device memory; only row locations are copied, rows are gathered there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.batches.row_reader import RowLocations, Rows, make_row_tensors, make_vocabulary_error
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.arrays import IndexArray

STORED_AS = {"uint16": torch.int16, "uint32": torch.int32}  # same bits; torch cannot index unsigned tensors
UINT16_MASK = 0xFFFF


class OnDeviceReader:
    """Reads the same rows as HostReader. An end_of_text follows each shard and ends its last document."""

    def __init__(self, tokens: Tensor, firsts: list[IndexArray], end_of_text: int) -> None:
        self._tokens = tokens
        self._firsts = firsts
        self._end_of_text = end_of_text

    def read(self, locations: RowLocations) -> Rows:
        starts = np.empty_like(locations.starts)
        for corpus in np.unique(locations.corpora):
            mask = locations.corpora == corpus
            starts[mask] = self._firsts[corpus][locations.shards[mask]] + locations.starts[mask]
        sent = Rows(torch.from_numpy(starts), *make_row_tensors(locations, len(self._firsts))).to(self._tokens.device)
        steps = torch.arange(locations.width + 1, device=self._tokens.device)
        indices = (sent.tokens[:, None] + steps).clamp_(max=len(self._tokens) - 1)
        rows = self._tokens[indices].long()
        if self._tokens.dtype == torch.int16:
            rows &= UINT16_MASK
        if sent.lengths is not None:
            rows = rows.where(steps <= sent.lengths[:, None], self._end_of_text)
        return Rows(rows, sent.lengths, sent.corpora)

    def prefetch(self, upcoming: list[list[int]]) -> None:
        """Does nothing: all shards are in memory."""


def load_on_device(corpora: Corpora, device: torch.device) -> OnDeviceReader:
    """Copies all training shards to the device; raises UserError if they do not fit or are remote."""
    for shards in corpora.shards:
        if hasattr(shards.train, "prefetch"):
            raise UserError(
                f"data_on_device needs local shards, and those of {shards.location} are remote; copy them here or "
                f"leave data_on_device out"
            )
    # External formats may use a wider type than their tokens need.
    dtype = max((shards.manifest.dtype for shards in corpora.shards), key=lambda name: np.dtype(name).itemsize)
    arrays = [array for shards in corpora.shards for array in shards.train]
    size = sum(len(array) + 1 for array in arrays)
    _check_memory(size * np.dtype(dtype).itemsize, device)
    tokens = torch.empty(size, dtype=STORED_AS[dtype], device=device)
    firsts: list[IndexArray] = []
    end = 0
    for shards in corpora.shards:
        sizes = np.array([len(array) + 1 for array in shards.train], dtype=np.int64)
        firsts.append(end + np.cumsum(sizes) - sizes)
        for shard, array in enumerate(shards.train):
            if (largest := int(array.max())) >= corpora.tokenizer.vocab_size:
                where = f"shard {shard} of {shards.location}"
                raise make_vocabulary_error(where, largest, corpora.tokenizer.vocab_size)
            terminated = np.append(array.astype(dtype), np.array(corpora.tokenizer.end_of_text, dtype=dtype))
            signed = terminated.view(np.int16 if dtype == "uint16" else np.int32)
            tokens[end : end + len(terminated)].copy_(torch.from_numpy(signed))  # blocking: another stream reads it
            end += len(terminated)
    return OnDeviceReader(tokens, firsts, corpora.tokenizer.end_of_text)


def _check_memory(needed_bytes: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if needed_bytes > free_bytes:
        raise UserError(
            f"data_on_device needs {needed_bytes / 2**30:.1f} GiB for the training tokens, and {device} has "
            f"{free_bytes / 2**30:.1f} GiB free; leave data_on_device out or use less data"
        )
