"""All training tokens in the memory of the device: only places travel there, and rows are gathered on the spot."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.batches.row_reader import RowLocations, Rows, describe_locations, make_vocabulary_error
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.arrays import IndexArray

STORED_AS = {"uint16": torch.int16, "uint32": torch.int32}  # same bits; torch indexes no unsigned numbers
UINT16_MASK = 0xFFFF


class OnDeviceReader:
    """Reads the same rows as a HostReader. After each shard stands an end_of_text, which closes its last document."""

    def __init__(self, tokens: Tensor, firsts: list[IndexArray], end_of_text: int) -> None:
        self._tokens = tokens
        self._firsts = firsts
        self._end_of_text = end_of_text

    def read(self, places: RowLocations) -> Rows:
        starts = np.empty_like(places.starts)
        for corpus in np.unique(places.corpora):
            own = places.corpora == corpus
            starts[own] = self._firsts[corpus][places.shards[own]] + places.starts[own]
        carried = describe_locations(places, len(self._firsts))
        sent = Rows(torch.from_numpy(starts), *carried).to(self._tokens.device)
        steps = torch.arange(places.width + 1, device=self._tokens.device)
        where = (sent.tokens[:, None] + steps).clamp_(max=len(self._tokens) - 1)
        rows = self._tokens[where].long()
        if self._tokens.dtype == torch.int16:
            rows &= UINT16_MASK
        if sent.lengths is not None:
            rows = rows.where(steps <= sent.lengths[:, None], self._end_of_text)
        return Rows(rows, sent.lengths, sent.corpora)

    def prefetch(self, upcoming: list[list[int]]) -> None:
        """Everything is here."""


def load_on_device(corpora: Corpora, device: torch.device) -> OnDeviceReader:
    """Copies all training shards to the device; raises UserError where they do not fit or are not at hand."""
    for shards in corpora.shards:
        if hasattr(shards.train, "prefetch"):
            raise UserError(
                f"data_on_device keeps whole corpora, and the shards of {shards.location} come from elsewhere; "
                f"copy them to this machine or leave it out"
            )
    # Other projects' files may be wider than their tokens need.
    dtype = max((shards.manifest.dtype for shards in corpora.shards), key=lambda name: np.dtype(name).itemsize)
    arrays = [array for shards in corpora.shards for array in shards.train]
    size = sum(len(array) + 1 for array in arrays)
    _check_memory(size * np.dtype(dtype).itemsize, device)
    tokens = torch.empty(size, dtype=STORED_AS[dtype], device=device)
    firsts: list[IndexArray] = []
    place = 0
    for shards in corpora.shards:
        sizes = np.array([len(array) + 1 for array in shards.train], dtype=np.int64)
        firsts.append(place + np.cumsum(sizes) - sizes)
        for shard, array in enumerate(shards.train):
            if (largest := int(array.max())) >= corpora.tokenizer.vocab_size:
                where = f"shard {shard} of {shards.location}"
                raise make_vocabulary_error(where, largest, corpora.tokenizer.vocab_size)
            closed = np.append(array.astype(dtype), np.array(corpora.tokenizer.end_of_text, dtype=dtype))
            signed = closed.view(np.int16 if dtype == "uint16" else np.int32)
            tokens[place : place + len(closed)].copy_(torch.from_numpy(signed))  # waits: another stream reads it
            place += len(closed)
    return OnDeviceReader(tokens, firsts, corpora.tokenizer.end_of_text)


def _check_memory(needed_bytes: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if needed_bytes > free_bytes:
        raise UserError(
            f"data_on_device needs {needed_bytes / 2**30:.1f} GiB for the training tokens, and {device} has "
            f"{free_bytes / 2**30:.1f} GiB free; leave it out, or use less data"
        )
