"""What training makes smaller: the head's loss, the routers' and those of heads that look further ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compositions import COMPOSITIONS, CONTEXT, build_wild, draw_tokens

from gptmill.config.model import ModelConfig, Moe
from gptmill.models.attention import BlockContext
from gptmill.models.block import Block
from gptmill.models.gpt import GPT
from gptmill.models.losses import IGNORE_INDEX, LossConfig
from gptmill.models.mixture_of_experts import RouterStats

IGNORED = [[1, 2], [3, 7]]  # places in the rows of a batch


def draw_targets() -> torch.Tensor:
    targets = draw_tokens(3, CONTEXT, seed=2)
    for row, places in enumerate(IGNORED):
        targets[row, places] = IGNORE_INDEX
    return targets


@torch.no_grad()
def look_further(model: GPT, head: int, tokens: torch.Tensor, targets: torch.Tensor, apart: bool) -> torch.Tensor:
    """The plain way, for a model of learned positions: the loss of one head, target by target."""
    places = torch.arange(CONTEXT)
    starts = torch.zeros_like(tokens)
    if apart:
        starts[:, 5:] = 5
    x = model.token_embedding(tokens) + model.position_embedding(places - starts)
    seen = (places[:, None] >= places) & (starts[:, :, None] == starts[:, None])
    context = BlockContext(mask=BlockContext().mask._replace(dense_B1TS=seen.unsqueeze(1)))
    for block in [*model.blocks, model.extra_blocks[head]]:
        x, _ = block(x, context)
    log_probabilities = model.lm_head(model.final_norm(x)).log_softmax(dim=-1)
    losses = []
    for row in range(len(tokens)):
        for place in range(CONTEXT - head - 1):
            target = targets[row, place + head + 1]
            if target != IGNORE_INDEX and starts[row, place] == starts[row, place + head + 1]:
                losses.append(-log_probabilities[row, place, target])
    return torch.stack(losses).sum()


@pytest.mark.parametrize("apart", [False, True])
def test_heads_that_look_further_add_the_loss_of_each_of_their_targets(apart: bool) -> None:
    model, tokens, targets = build_wild(COMPOSITIONS["extra heads"]), draw_tokens(3, CONTEXT), draw_targets()
    documents = torch.tensor([0] * 5 + [5] * 7).expand(3, -1) if apart else None
    losses = model.train()(tokens, targets, documents)
    further = [look_further(model, head, tokens, targets, apart) for head in range(2)]
    torch.testing.assert_close(losses.objective, losses.cross_entropy + sum(further))
    evaluated = model.eval()(tokens, targets, documents)
    torch.testing.assert_close(evaluated.objective, losses.cross_entropy)


def test_a_row_shorter_than_a_head_looks_ahead_costs_nothing() -> None:
    model = build_wild(COMPOSITIONS["extra heads"]).train()
    losses = model(draw_tokens(2, 1), draw_tokens(2, 1, seed=2))
    torch.testing.assert_close(losses.objective, losses.cross_entropy)


def test_sampling_takes_no_notice_of_heads_that_look_further() -> None:
    model, tokens = build_wild(COMPOSITIONS["extra heads"]), draw_tokens(2, CONTEXT)
    before = model.logits(tokens)
    with torch.no_grad():
        for parameter in model.extra_blocks.parameters():
            parameter.zero_()
    assert torch.equal(model.logits(tokens), before)


@pytest.mark.parametrize("name", ["moe", "everything"])
def test_the_routers_losses_are_added_for_each_valid_target(name: str) -> None:
    config = replace(COMPOSITIONS[name], mtp_heads=0)
    model, tokens, targets = build_wild(config), draw_tokens(3, CONTEXT), draw_targets()
    seen: list[RouterStats] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        block.mlp.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs[1]))
    evaluated = model(tokens, targets)
    assert evaluated.objective.item() == evaluated.cross_entropy.item()
    seen.clear()
    losses = model.train()(tokens, targets)
    moe = config.feed_forward
    assert isinstance(moe, Moe)
    balance = sum(stats.aux_loss for stats in seen) / config.num_layers
    z_loss = sum(stats.z_loss for stats in seen) / config.num_layers
    added = (targets != IGNORE_INDEX).sum() * (moe.router_aux_loss * balance + moe.router_z_loss * z_loss)
    assert added.item() > 0
    torch.testing.assert_close(losses.objective, losses.cross_entropy + added)


@pytest.mark.parametrize("name", ["moe", "everything"])
def test_every_token_is_counted_at_its_experts(name: str) -> None:
    config = COMPOSITIONS[name]
    targets = draw_targets()
    losses = build_wild(config).train()(draw_tokens(3, CONTEXT), targets)
    moe = config.feed_forward
    assert isinstance(moe, Moe)
    assert losses.experts_LE.shape == (config.num_layers, moe.num_experts)
    visits = int((targets != IGNORE_INDEX).sum()) * moe.experts_per_token
    assert losses.experts_LE.sum(dim=1).tolist() == [visits] * config.num_layers
    assert not losses.experts_LE.requires_grad


def test_without_experts_nothing_is_counted() -> None:
    losses = build_wild()(draw_tokens(3, CONTEXT), draw_targets())
    assert losses.experts_LE is None
    assert losses.per_domain_G is None


@pytest.mark.parametrize("training", [False, True])
def test_losses_are_told_apart_by_the_groups_of_rows(training: bool) -> None:
    model, tokens, targets = build_wild().train(training), draw_tokens(3, CONTEXT), draw_targets()
    model.loss_config = LossConfig(num_domains=4)
    losses = model(tokens, targets, domains_B=torch.tensor([2, 0, 2]))
    rows = [F.cross_entropy(model.logits(tokens)[row], targets[row], reduction="sum") for row in range(3)]
    expected = torch.stack([rows[1], torch.zeros(()), rows[0] + rows[2], torch.zeros(())])
    torch.testing.assert_close(losses.per_domain_G, expected)


def test_what_the_rule_adds_is_for_training_only() -> None:
    model, tokens, targets = build_wild(), draw_tokens(3, CONTEXT), draw_targets()
    plain = model(tokens, targets).objective
    model.loss_config = LossConfig(label_smoothing=0.1, z_loss=0.1)
    assert torch.equal(model(tokens, targets).objective, plain)
    losses = model.train()(tokens, targets)
    assert losses.objective > plain
    assert torch.equal(losses.cross_entropy, plain)


@pytest.mark.parametrize("name", ["classic", "everything", "extra heads"])
def test_recomputing_blocks_changes_no_gradient(name: str) -> None:
    config: ModelConfig = replace(COMPOSITIONS[name], dropout=0.1)
    gradients = []
    for how in ("none", "full"):
        model = build_wild(config).train()
        model.set_activation_checkpointing(how)
        torch.manual_seed(0)
        model(draw_tokens(3, CONTEXT), draw_targets()).objective.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_padding_counts_for_nothing_with_the_routers() -> None:
    model, tokens, targets = build_wild(COMPOSITIONS["moe"]).train(), draw_tokens(3, CONTEXT), draw_tokens(3, CONTEXT)
    alone = model(tokens, targets)
    padding = torch.full((4, CONTEXT), IGNORE_INDEX)
    padded = model(torch.cat([tokens, torch.zeros_like(padding)]), torch.cat([targets, padding]))
    torch.testing.assert_close(padded.objective, alone.objective)
    torch.testing.assert_close(padded.experts_LE, alone.experts_LE)
