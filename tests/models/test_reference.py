"""Every composition against the plain reference beside: logits and gradients, with documents apart and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compositions import COMPOSITIONS, TINY, build_wild, draw_tokens
from reference import compute_logits

from gptmill.config.model import ModelConfig, Moe, SwiGlu

PLAIN = {
    name: replace(config, feed_forward=SwiGlu(ffn_size=8)) if isinstance(config.feed_forward, Moe) else config
    for name, config in COMPOSITIONS.items()
    if name != "moe"
}
WIDTH = 8
STARTS = [[0, 0, 0, 0, 4, 4, 4, 4], [0, 1, 1, 1, 1, 1, 6, 6]]


@pytest.mark.parametrize("are_apart", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN.keys())
def test_logits_and_gradients_are_the_reference_s(config: ModelConfig, are_apart: bool) -> None:
    starts = STARTS if are_apart else [None]
    model, tokens = build_wild(config, std=0.3), draw_tokens(len(starts), WIDTH)
    documents = torch.tensor(STARTS) if are_apart else None
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in model.named_parameters()}
    expected = torch.stack(
        [compute_logits(config, weights, row.tolist(), own) for row, own in zip(tokens, starts, strict=True)]
    )
    logits = model.lm_head(model.hidden_states(tokens, documents_BT=documents))
    torch.testing.assert_close(logits, expected.float(), atol=2e-5, rtol=2e-4)
    push = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * push).sum().backward()
    (expected * push).sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("extra_blocks"):
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        want = weights[name].grad
        assert want is not None
        torch.testing.assert_close(parameter.grad, want.float(), atol=2e-4, rtol=2e-3, msg=name)


def test_the_reference_tells_compositions_apart() -> None:
    """Otherwise the test above could pass by seeing nothing."""
    tokens = draw_tokens(WIDTH).tolist()
    config = replace(TINY, attention_windows="3", qk_norm=False)
    weights = {name: parameter.detach().double() for name, parameter in build_wild(config).named_parameters()}
    full = compute_logits(TINY, weights, tokens, None)
    assert not torch.allclose(compute_logits(config, weights, tokens, None), full)
    assert not torch.allclose(compute_logits(TINY, weights, tokens, STARTS[0]), full)
