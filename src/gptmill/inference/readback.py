"""Brings sampled tokens to the host: from the CPU at once; from a GPU some steps late, so that it never waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gptmill.inference.decoding import DecodingState

STEPS_PER_COPY = 8  # from a GPU


class SampledTokens(NamedTuple):
    """What one step sampled: a token for each text of the batch."""

    tokens: list[int]
    log_probs: list[float] | None


class _Copy:
    """A copy of some steps to the host that may still be under way."""

    def __init__(self, state: DecodingState, first: int, last: int) -> None:
        self._tokens = _copy_to_host(state.sampled_BS[:, first:last])
        self._log_probs = None if state.log_probs_BS is None else _copy_to_host(state.log_probs_BS[:, first:last])
        self._done = torch.cuda.current_stream().record_event() if state.sampled_BS.is_cuda else None

    def wait(self) -> Iterator[SampledTokens]:
        if self._done is not None:
            self._done.synchronize()
        log_probs = None if self._log_probs is None else self._log_probs.t().tolist()
        for step, tokens in enumerate(self._tokens.t().tolist()):
            yield SampledTokens(tokens, None if log_probs is None else log_probs[step])


def read_back(steps: Iterable[int], state: DecodingState) -> Iterator[SampledTokens]:
    """Hands out what each step has sampled; while it does so, a GPU already works on the next steps."""
    group = STEPS_PER_COPY if state.sampled_BS.is_cuda else 1
    first, last, pending = 0, 0, None
    for last in steps:
        if last - first < group:
            continue
        started = _Copy(state, first, last)
        first = last
        if pending is not None:
            yield from pending.wait()
        if state.sampled_BS.is_cuda:
            pending = started
        else:
            yield from started.wait()
    if pending is not None:
        yield from pending.wait()
    if last > first:
        yield from _Copy(state, first, last).wait()


def _copy_to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
