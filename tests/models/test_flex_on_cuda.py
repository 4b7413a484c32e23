"""Windows and documents on a GPU: flex_attention gives what the dense masks give, and gradients too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compositions import ROPE, TINY, VOCAB

from gptmill.config.model import ModelConfig
from gptmill.models import transformer
from gptmill.models.gpt import GPT, build_gpt
from gptmill.models.masks import can_use_flex_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH = 384
WIDE = replace(TINY, embd_size=64, context_length=WIDTH, positions=ROPE)
WINDOWS = {"none": None, "one": "100", "two": "100,full"}
HEADS = {"full": None, "grouped": 2}


def draw(seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (3, WIDTH), generator=torch.Generator().manual_seed(seed)).cuda()


def mark_documents() -> torch.Tensor:
    starts = torch.zeros(3, WIDTH, dtype=torch.int64)
    for row, places in enumerate([(5, 130), (200,), (128, 129, 300)]):
        for place in places:
            starts[row, place:] = place
    return starts.cuda()


def compute(
    model: GPT, monkeypatch: pytest.MonkeyPatch, documents: torch.Tensor | None, *, use_flex: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and all gradients, with the one form of masks or the other."""
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "can_use_flex_attention", lambda *_arguments, **_named: use_flex)
        model.zero_grad()
        loss = model(draw(1), draw(2), documents).objective / (3 * WIDTH)
        loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_blocks_and_dense_masks_agree(
    heads: str, windows: str, are_apart: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    config: ModelConfig = replace(WIDE, attention_windows=WINDOWS[windows], num_kv_heads=HEADS[heads])
    assert can_use_flex_attention(config, torch.device("cuda"), training=True)
    model = build_gpt(config, VOCAB, seed=1).cuda().train()
    documents = mark_documents() if are_apart else None
    loss, gradients = compute(model, monkeypatch, documents, use_flex=False)
    if compiled:
        model.compile_parts()
    other_loss, other_gradients = compute(model, monkeypatch, documents, use_flex=True)
    torch.testing.assert_close(other_loss, loss, atol=1e-4, rtol=1e-4)
    for one, other in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=2e-2)


def test_changing_one_document_moves_no_other_s_logits() -> None:
    model = build_gpt(replace(WIDE, attention_windows="100,full"), VOCAB, seed=1).cuda().eval()
    documents, tokens = mark_documents(), draw(1)
    changed = tokens.clone()
    changed[1, :200] = (changed[1, :200] + 1) % VOCAB
    with torch.no_grad():
        before, after = (model.hidden_states(row, documents_BT=documents) for row in (tokens, changed))
    assert torch.equal(before[1, 200:], after[1, 200:])
    assert not torch.allclose(before[1, :200], after[1, :200])


def test_a_compiled_model_trains_and_evaluates_by_turns() -> None:
    """In a size at which blocks that were made inside of the compiled model once read outside of their memory."""
    torch._dynamo.reset()
    config = replace(WIDE, embd_size=128, num_layers=3, context_length=1024, attention_windows="256,256,full")
    model = build_gpt(config, VOCAB, seed=1).cuda()
    model.compile_parts()
    documents = torch.arange(1024).where(torch.arange(1024) % 300 == 7, 0).cummax(dim=0).values.expand(32, -1).cuda()
    tokens, targets = (torch.randint(VOCAB, (32, 1024)).cuda() for _ in range(2))
    for _ in range(2):
        model.train()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(tokens, targets, documents).objective.backward()
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens, targets, documents).cross_entropy
        torch.cuda.synchronize()
        assert loss.isfinite()
