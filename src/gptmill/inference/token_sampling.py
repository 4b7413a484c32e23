"""Sampling: the next token of each text of a batch, on its device and without waiting for it.

A token comes from its logits and one uniform number, by inverting the cumulative distribution. The numbers are drawn
beforehand on the CPU, so that a text depends on its seed alone: not on the device, nor on the batch that it is in.

Definitions and order are those of `transformers`: repetition penalty, temperature, top-k, top-p, min-p.

Shape suffixes: B batch, V vocabulary, N candidates, G groups of them, W width of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOGIT = 1e4
MIN_TEMPERATURE = 1e-6  # below it, dividing by the temperature overflows; greedy decoding gives the same token
GROUP_WIDTH = 256
BELOW_ONE = 1 - 2.0**-20


@dataclass(frozen=True)
class SamplingConfig:
    """How to sample the next token from the logits; temperature 0 is greedy decoding."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def draw_uniforms(seed: int, count: int) -> Tensor:
    """The numbers in [0, 1) of one text; more of them begin with the same ones."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def sample_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: SamplingConfig, seen_BV: Tensor | None = None
) -> Tensor:
    """Samples one token for each text; `seen_BV` marks the tokens that the repetition penalty is for.

    Accepts non-finite logits, so that samples of a diverged model do not end its run.
    """
    if sampling.is_greedy and seen_BV is None:
        return logits_BV.nan_to_num(nan=0.0).argmax(dim=-1)
    logits_BV = logits_BV.float().nan_to_num().clamp(-MAX_LOGIT, MAX_LOGIT)
    if seen_BV is not None:
        logits_BV = penalise_repetition(logits_BV, seen_BV, sampling.repetition_penalty)
    if sampling.is_greedy:
        return logits_BV.argmax(dim=-1)
    logits_BN, tokens_BN = find_candidates(logits_BV / sampling.temperature, sampling)
    indices_B1 = invert_distribution(logits_BN.softmax(dim=-1), uniforms_B)[:, None]
    return (indices_B1 if tokens_BN is None else tokens_BN.gather(1, indices_B1)).squeeze(1)


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divides positive logits of tokens seen by the penalty and multiplies negative ones (CTRL, Keskar et al. 2019)."""
    return torch.where(seen_BV, torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV)


def find_candidates(logits_BV: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor | None]:
    """The logits that top-k, top-p and min-p leave, the others at -inf; and their tokens, None for the vocabulary's.

    Top-k finds its few tokens without sorting the vocabulary; top-p alone needs to.
    """
    tokens_BN: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        logits_BV, tokens_BN = logits_BV.topk(sampling.top_k, dim=-1)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        if tokens_BN is None:
            logits_BV, tokens_BN = logits_BV.sort(dim=-1, descending=True)
        probabilities_BN = logits_BV.softmax(dim=-1)
        before_BN = probabilities_BN.cumsum(dim=-1) - probabilities_BN
        is_dropped_BN = before_BN >= sampling.top_p
        is_dropped_BN[:, 0] = False  # rounding must not drop the likeliest
        logits_BV = logits_BV.masked_fill(is_dropped_BN, -torch.inf)
    if sampling.min_p is not None and sampling.min_p > 0:
        least_B1 = logits_BV.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    return logits_BV, tokens_BN


def invert_distribution(weights_BN: Tensor, uniforms_B: Tensor) -> Tensor:
    """The index whose stretch of the running sum holds the uniform number: first its group, then its place there.

    Never one of weight 0. It needs no running sum of the whole row, which has no deterministic algorithm on CUDA.
    """
    B, N = weights_BN.shape
    weights_BGW = F.pad(weights_BN, (0, -N % GROUP_WIDTH)).view(B, -1, GROUP_WIDTH)
    ends_BG = sum_running(weights_BGW.sum(dim=-1))
    target_B1 = (uniforms_B[:, None] * ends_BG[:, -1:]).minimum(ends_BG[:, -1:] * BELOW_ONE)
    group_B1 = (ends_BG <= target_B1).sum(dim=-1, keepdim=True)
    start_B1 = F.pad(ends_BG, (1, 0)).gather(1, group_B1)
    chosen_BW = weights_BGW.gather(1, group_B1[:, :, None].expand(-1, -1, GROUP_WIDTH)).squeeze(1)
    ends_BW = sum_running(chosen_BW)
    rest_B1 = (target_B1 - start_B1).minimum(ends_BW[:, -1:] * BELOW_ONE)
    place_B = (ends_BW <= rest_B1).sum(dim=-1)
    return group_B1.squeeze(1) * GROUP_WIDTH + place_B


def sum_running(values_BN: Tensor) -> Tensor:
    """Running sums of short rows of numbers that are not negative. They never fall, and are the same every time."""
    N = values_BN.shape[-1]
    is_before_NN = torch.ones(N, N, dtype=torch.bool, device=values_BN.device).tril()
    return torch.where(is_before_NN, values_BN[:, None, :], 0.0).sum(dim=-1)
