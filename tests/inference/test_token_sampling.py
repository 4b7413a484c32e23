"""Sampling: each option leaves the distribution that transformers' logits processors leave, in their order."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from gptmill.inference.token_sampling import (
    SamplingConfig,
    draw_uniforms,
    find_candidates,
    invert_distribution,
    penalise_repetition,
    sample_tokens,
)

B, V = 4, 1000
CONFIGS = {
    "temperature": SamplingConfig(0.7),
    "top-k": SamplingConfig(1.0, top_k=7),
    "top-p": SamplingConfig(1.0, top_p=0.6),
    "top-k and top-p": SamplingConfig(1.3, top_k=50, top_p=0.8),
    "min-p": SamplingConfig(1.0, min_p=0.2),
    "all": SamplingConfig(0.9, top_k=200, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
    "reward": SamplingConfig(1.0, repetition_penalty=0.8),
}


def filter_like_transformers(logits_BV: Tensor, sampling: SamplingConfig, seen_BT: Tensor) -> Tensor:
    """The probabilities after the processors, in the order of transformers' generate."""
    from transformers.generation import logits_process as theirs

    processors = [theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    processors.append(theirs.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        processors.append(theirs.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        processors.append(theirs.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        processors.append(theirs.MinPLogitsWarper(sampling.min_p))
    return theirs.LogitsProcessorList(processors)(seen_BT, logits_BV).softmax(dim=-1)


@pytest.mark.parametrize("sampling", CONFIGS.values(), ids=CONFIGS.keys())
def test_probabilities_are_those_of_transformers(sampling: SamplingConfig) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_BV = 3 * torch.randn(B, V, generator=generator)
    seen_BT = torch.randint(V, (B, 40), generator=generator)
    seen_BV = torch.zeros(B, V, dtype=torch.bool).scatter_(1, seen_BT, True)
    penalised_BV = penalise_repetition(logits_BV, seen_BV, sampling.repetition_penalty)
    left_BN, tokens_BN = find_candidates(penalised_BV / sampling.temperature, sampling)
    found_BV = left_BN.softmax(dim=-1)
    if tokens_BN is not None:
        found_BV = torch.zeros(B, V).scatter_(1, tokens_BN, found_BV)
    expected_BV = filter_like_transformers(logits_BV, sampling, seen_BT)
    assert ((found_BV > 0) == (expected_BV > 0)).all()
    torch.testing.assert_close(found_BV, expected_BV, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("sampling", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_come_as_often_as_their_probabilities_say(sampling: SamplingConfig) -> None:
    draws = 2500
    logits_V = 2 * torch.randn(30, generator=torch.Generator().manual_seed(5))
    seen_T = torch.tensor([[1, 2, 3]])
    seen_BV = torch.zeros(draws, 30, dtype=torch.bool)
    seen_BV[:, seen_T[0]] = True
    drawn = Counter(sample_tokens(logits_V.expand(draws, -1), draw_uniforms(0, draws), sampling, seen_BV).tolist())
    expected_V = filter_like_transformers(logits_V[None], sampling, seen_T)[0]
    assert [drawn[token] / draws for token in range(30)] == pytest.approx(expected_V.tolist(), abs=0.03)


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 50_257])
def test_the_extremes_of_the_numbers_find_tokens_that_have_a_weight(size: int) -> None:
    weights_BN = torch.zeros(3, size)
    place = size // 2
    weights_BN[:, place] = 1e-3
    uniforms_B = torch.tensor([0.0, 0.5, 1 - 2**-24])
    assert invert_distribution(weights_BN, uniforms_B).tolist() == [place] * 3


def test_the_inverse_is_the_running_sums() -> None:
    weights_BN = torch.rand(64, 5000, generator=torch.Generator().manual_seed(1)).double()
    uniforms_B = torch.rand(64, generator=torch.Generator().manual_seed(2)).double()
    ends_BN = weights_BN.cumsum(dim=-1)
    expected_B = torch.searchsorted(ends_BN, uniforms_B[:, None] * ends_BN[:, -1:], right=True)[:, 0]
    assert (invert_distribution(weights_BN, uniforms_B) == expected_B).all()


@pytest.mark.parametrize("sampling", [SamplingConfig(0.0), SamplingConfig(), *CONFIGS.values()])
def test_logits_of_a_diverged_model_still_give_tokens(sampling: SamplingConfig) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        token = sample_tokens(torch.full((1, 30), value), torch.tensor([0.3]), sampling)
        assert 0 <= int(token) < 30


def test_more_numbers_begin_with_the_same_ones() -> None:
    longest = draw_uniforms(9, 1000)
    for count in (1, 2, 15, 16, 17, 100):
        assert torch.equal(draw_uniforms(9, count), longest[:count])
