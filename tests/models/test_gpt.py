"""The model: its initialisation, its loss, its dropout, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compositions import COMPOSITIONS, TINY, VOCAB, build_wild, draw_tokens

from gptmill.config.model import ModelConfig
from gptmill.models.gpt import build_gpt
from gptmill.models.losses import IGNORE_INDEX


def test_the_loss_is_the_summed_cross_entropy_of_the_logits() -> None:
    model, tokens, targets = build_wild(), draw_tokens(3, 12), draw_tokens(3, 12, seed=2)
    log_probabilities = model.logits(tokens).log_softmax(dim=-1)
    expected = -log_probabilities.gather(2, targets[..., None]).sum()
    torch.testing.assert_close(model(tokens, targets).cross_entropy, expected)
    torch.testing.assert_close(
        model(tokens, targets).objective,
        F.cross_entropy(model.logits(tokens).flatten(0, 1), targets.flatten(), reduction="sum"),
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["classic", "everything"])
def test_ignored_targets_count_for_nothing(name: str, training: bool) -> None:
    model, tokens, targets = build_wild(COMPOSITIONS[name]), draw_tokens(4, 12), draw_tokens(4, 12, seed=2)
    expected = model(tokens[:3], targets[:3]).cross_entropy
    targets[3] = IGNORE_INDEX
    model.train(training)
    torch.testing.assert_close(model(tokens, targets).cross_entropy, expected)
    nothing = model(tokens, torch.full_like(targets, IGNORE_INDEX))
    assert nothing.objective.item() == nothing.cross_entropy.item() == 0.0


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model, tokens = build_wild(), draw_tokens(4, 12)
    torch.testing.assert_close(model.logits(tokens), torch.cat([model.logits(row[None]) for row in tokens]))


@pytest.mark.parametrize("name", ["classic", "rope", "rope, linear", "rope, llama3"])
def test_positions_matter(name: str) -> None:
    """The last token's logits change when two before it change places, which a set of tokens would not tell."""
    model, tokens = build_wild(COMPOSITIONS[name]), torch.tensor([[7, 8, 9], [8, 7, 9]])
    logits = model.logits(tokens)
    assert not torch.allclose(logits[0, 2], logits[1, 2])


def test_without_positions_one_layer_sees_a_set() -> None:
    model = build_wild(replace(COMPOSITIONS["no positions"], num_layers=1))
    logits = model.logits(torch.tensor([[7, 8, 9], [8, 7, 9]]))
    torch.testing.assert_close(logits[0, 2], logits[1, 2])


def test_the_first_loss_is_that_of_guessing() -> None:
    config = ModelConfig(num_layers=4, embd_size=64, num_heads=4, context_length=32)
    model = build_gpt(config, 1000, seed=3)
    tokens, targets = (torch.randint(1000, (8, 32), generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    assert model(tokens, targets).cross_entropy.item() / tokens.numel() == pytest.approx(math.log(1000), abs=0.1)


def test_fresh_weights_have_gpt2s_spread() -> None:
    config = ModelConfig(num_layers=4, embd_size=128, num_heads=4, context_length=128)
    model = build_gpt(config, 256, seed=5)
    residual = {f"blocks.{layer}.{part}.proj.weight" for layer in range(4) for part in ("attention", "mlp")}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 4) if name in residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert parameter.mean().item() == pytest.approx(0, abs=4 * std / math.sqrt(parameter.numel())), name
    assert residual <= dict(model.named_parameters()).keys()


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    first = build_gpt(TINY, VOCAB, seed=1).state_dict()
    torch.rand(3)
    again, other = build_gpt(TINY, VOCAB, seed=1).state_dict(), build_gpt(TINY, VOCAB, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name, weight in first.items() if weight.std() > 0)


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    build_gpt(TINY, VOCAB, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_for_training_only() -> None:
    model = build_wild(replace(TINY, dropout=0.5))
    tokens = draw_tokens(2, 12)
    expected = build_wild().logits(tokens)
    torch.testing.assert_close(model.eval().logits(tokens), expected)
    model.train()
    torch.manual_seed(0)
    first, second = model.logits(tokens), model.logits(tokens)
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, expected)


@pytest.mark.parametrize("part", ["embedding", "attention", "residual"])
def test_dropout_reaches_embeddings_attention_and_residual_branches(part: str) -> None:
    config = ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=12, dropout=0.5)
    model, tokens = build_wild(config).train(), draw_tokens(2, 12)
    if part != "embedding":
        model.dropout.p = 0.0
    if part != "attention":
        model.blocks[0].attention.dropout = 0.0
    if part != "residual":
        model.blocks[0].dropout.p = 0.0
    torch.manual_seed(0)
    assert not torch.allclose(model.logits(tokens), model.logits(tokens))


def test_no_dropout_makes_training_and_evaluation_the_same() -> None:
    model, tokens = build_wild(), draw_tokens(2, 12)
    torch.testing.assert_close(model.train().logits(tokens), model.eval().logits(tokens))


@pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
def test_every_parameter_gets_a_gradient(config: ModelConfig) -> None:
    model = build_wild(config).train()
    model(draw_tokens(4, 12), draw_tokens(4, 12, seed=2)).objective.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classic", "llama", "moe", "value embeddings"])
def test_a_few_steps_learn_a_sequence_by_heart(name: str) -> None:
    model, row = build_gpt(COMPOSITIONS[name], VOCAB, seed=1), draw_tokens(1, 13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(row[:, :-1], row[:, 1:]).objective / 12
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_the_classic_model_s_weights_keep_their_names_and_order() -> None:
    """Checkpoints are read by name, and fresh weights are drawn in this order."""
    block = "attention_norm attention.qkv attention.proj mlp_norm mlp.up mlp.proj".split()
    names = [f"blocks.{layer}.{part}.{kind}" for layer in range(2) for part in block for kind in ("weight", "bias")]
    outer = ["token_embedding.weight", "position_embedding.weight", *names, "final_norm.weight", "final_norm.bias"]
    model = build_gpt(TINY, VOCAB, seed=1)
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) == outer
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            std = 0.02 / math.sqrt(2 * 2) if name.endswith("proj.weight") else 0.02
            assert torch.equal(parameter, torch.empty_like(parameter).normal_(0.0, std, generator=generator)), name
