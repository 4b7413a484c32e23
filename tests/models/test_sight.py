"""Who sees whom, in every composition: nobody the future, documents not each other, windows only what is near."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compositions import COMPOSITIONS, CONTEXT, ROPE, TINY, VOCAB, build_wild, draw_tokens

from gptmill.config.model import ModelConfig
from gptmill.models.gpt import GPT

SEPARATOR = 0
all_compositions = pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())


@all_compositions
@torch.no_grad()
def test_no_position_sees_what_comes_after_it(config: ModelConfig) -> None:
    model, tokens = build_wild(config), draw_tokens(1, CONTEXT)
    before = model.logits(tokens)
    for place in range(CONTEXT):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % VOCAB
        after = model.logits(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place], before[:, place])
        if config.attention_windows is None:
            assert all(not torch.allclose(after[:, later], before[:, later]) for later in range(place, CONTEXT))


@pytest.mark.parametrize(("window", "layers"), [(1, 3), (2, 1), (3, 1), (3, 2), (4, 3), (CONTEXT, 2)])
@torch.no_grad()
def test_a_token_is_seen_as_far_on_as_the_windows_of_all_layers_reach(window: int, layers: int) -> None:
    config = replace(TINY, num_layers=layers, attention_windows=str(window), positions=ROPE)
    model, tokens = build_wild(config), draw_tokens(1, CONTEXT)
    changed = tokens.clone()
    changed[0, 1] = (changed[0, 1] + 1) % VOCAB
    moved = ~torch.isclose(model.logits(changed), model.logits(tokens), atol=1e-6).all(dim=-1)[0]
    last = min(CONTEXT - 1, 1 + layers * (window - 1))
    assert moved.tolist() == [1 <= place <= last for place in range(CONTEXT)]


@torch.no_grad()
def test_a_window_as_long_as_the_row_changes_nothing() -> None:
    model = build_wild(replace(TINY, attention_windows=str(CONTEXT)))
    tokens = draw_tokens(2, CONTEXT)
    assert torch.equal(model.logits(tokens), build_wild().logits(tokens))


def draw_documents(*lengths: int, seed: int = 3) -> list[torch.Tensor]:
    """Documents of so many tokens, each opened by the separator, which occurs nowhere else."""
    tokens = [draw_tokens(length, seed=seed + place).clamp(min=1) for place, length in enumerate(lengths)]
    for document in tokens:
        document[0] = SEPARATOR
    return tokens


def mark_documents(tokens_BT: torch.Tensor) -> torch.Tensor:
    """The plain way: for each token, the last place at or before it that holds the separator."""
    return torch.tensor(
        [
            [max((s for s in range(t + 1) if row[s] == SEPARATOR), default=0) for t in range(len(row))]
            for row in tokens_BT
        ]
    )


def compute_losses(model: GPT, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The loss of every position, with documents kept apart."""
    logits = model.lm_head(model.hidden_states(tokens_BT, documents_BT=mark_documents(tokens_BT)))
    return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="none").view(targets_BT.shape)


@all_compositions
@torch.no_grad()
def test_a_document_has_the_same_losses_alone_as_between_others(config: ModelConfig) -> None:
    model, documents = build_wild(config), draw_documents(4, 5, 3)
    tokens = torch.cat(documents)[None]
    targets = torch.cat([tokens[:, 1:], torch.tensor([[SEPARATOR]])], dim=1)
    together = compute_losses(model, tokens, targets)
    alone = [
        F.cross_entropy(model.logits(part[None])[0], torch.cat([part[1:], torch.tensor([SEPARATOR])]), reduction="none")
        for part in documents
    ]
    torch.testing.assert_close(together[0], torch.cat(alone), atol=1e-4, rtol=1e-4)
    summed = model(tokens, targets, mark_documents(tokens)).cross_entropy
    torch.testing.assert_close(summed, torch.cat(alone).sum(), atol=1e-3, rtol=1e-4)


@all_compositions
@torch.no_grad()
def test_changing_one_document_moves_no_other_s_loss(config: ModelConfig) -> None:
    model, documents = build_wild(config), draw_documents(4, 5, 3)
    changed = [documents[0], draw_documents(5, seed=50)[0], documents[2]]
    assert not torch.equal(changed[1], documents[1])
    before, after = (torch.cat(parts)[None] for parts in (documents, changed))
    targets = draw_tokens(1, 12, seed=9)
    one, other = compute_losses(model, before, targets), compute_losses(model, after, targets)
    torch.testing.assert_close(one[0, :4], other[0, :4])
    torch.testing.assert_close(one[0, 9:], other[0, 9:])
    assert not torch.allclose(one[0, 5:9], other[0, 5:9])
    # Without the documents' places, the third would have seen the second.
    assert not torch.allclose(model.logits(before)[0, 9:], model.logits(after)[0, 9:])


def test_a_document_that_began_before_the_row_counts_from_the_row_s_start() -> None:
    model = build_wild()
    tokens = torch.cat([draw_tokens(5).clamp(min=1), *draw_documents(7)])[None]
    losses = compute_losses(model, tokens, draw_tokens(1, 12, seed=9))
    expected = F.cross_entropy(model.logits(tokens[:, :5])[0], draw_tokens(1, 12, seed=9)[0, :5], reduction="none")
    torch.testing.assert_close(losses[0, :5], expected)


def test_one_document_over_the_whole_row_changes_nothing() -> None:
    model, tokens = build_wild(), draw_tokens(3, 12)
    documents = torch.zeros_like(tokens)
    torch.testing.assert_close(model.hidden_states(tokens, documents_BT=documents), model.hidden_states(tokens))
