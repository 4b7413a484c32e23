"""The model: its initialisation, its loss, and that no position sees what comes after it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from gptmill.config.run import ModelConfig
from gptmill.models.gpt import GPT, IGNORED_TARGET, build_gpt

TINY = ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=12)
VOCAB = 50


def build_wild(config: ModelConfig = TINY, seed: int = 0) -> GPT:
    """A model whose every parameter matters: weights far larger than fresh ones, biases and norms at random too."""
    model = build_gpt(config, VOCAB, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return model


def draw_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def test_the_loss_is_the_summed_cross_entropy_of_the_logits() -> None:
    model, tokens, targets = build_wild(), draw_tokens(3, 12), draw_tokens(3, 12, seed=2)
    log_probabilities = model.logits(tokens).log_softmax(dim=-1)
    expected = -log_probabilities.gather(2, targets[..., None]).sum()
    torch.testing.assert_close(model(tokens, targets), expected)
    torch.testing.assert_close(
        model(tokens, targets), F.cross_entropy(model.logits(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    )


def test_label_smoothing_mixes_in_the_mean_over_the_vocabulary() -> None:
    model, tokens, targets = build_wild(), draw_tokens(3, 12), draw_tokens(3, 12, seed=2)
    log_probabilities = model.logits(tokens).log_softmax(dim=-1)
    picked = -log_probabilities.gather(2, targets[..., None]).sum()
    smooth = -log_probabilities.mean(dim=-1).sum()
    torch.testing.assert_close(model(tokens, targets, 0.1), 0.9 * picked + 0.1 * smooth)


def test_label_smoothing_gives_nothing_to_rows_that_only_pad() -> None:
    model, tokens, targets = build_wild(), draw_tokens(3, 12), draw_tokens(3, 12, seed=2)
    plain = model(tokens, targets, 0.1)
    model.vocab_size -= 8
    log_probabilities = model.logits(tokens).log_softmax(dim=-1)
    picked = -log_probabilities.gather(2, targets[..., None]).sum()
    smooth = -log_probabilities[..., : model.vocab_size].mean(dim=-1).sum()
    assert model(tokens, targets, 0.1) != plain
    torch.testing.assert_close(model(tokens, targets, 0.1), 0.9 * picked + 0.1 * smooth)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_ignored_targets_count_for_nothing(label_smoothing: float) -> None:
    model, tokens, targets = build_wild(), draw_tokens(4, 12), draw_tokens(4, 12, seed=2)
    expected = model(tokens[:3], targets[:3], label_smoothing)
    targets[3] = IGNORED_TARGET
    torch.testing.assert_close(model(tokens, targets, label_smoothing), expected)
    assert model(tokens, torch.full_like(targets, IGNORED_TARGET), label_smoothing).item() == 0.0


def test_no_position_sees_what_comes_after_it() -> None:
    model, tokens = build_wild(), draw_tokens(1, 12)
    before = model.logits(tokens)
    for place in range(12):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % VOCAB
        after = model.logits(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place])
        assert all(not torch.allclose(after[:, later], before[:, later]) for later in range(place, 12))


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model, tokens = build_wild(), draw_tokens(4, 12)
    torch.testing.assert_close(model.logits(tokens), torch.cat([model.logits(row[None]) for row in tokens]))


def test_positions_matter() -> None:
    logits = build_wild().logits(torch.full((1, 12), 7))
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_the_first_loss_is_that_of_guessing() -> None:
    config = ModelConfig(num_layers=4, embd_size=64, num_heads=4, context_length=32)
    model = build_gpt(config, 1000, seed=3)
    tokens, targets = (torch.randint(1000, (8, 32), generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    assert model(tokens, targets).item() / tokens.numel() == pytest.approx(math.log(1000), abs=0.1)


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
    model = build_wild(ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=12, dropout=0.5))
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


def test_every_parameter_gets_a_gradient() -> None:
    model = build_wild()
    model(draw_tokens(4, 12), draw_tokens(4, 12, seed=2)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_a_few_steps_learn_a_sequence_by_heart() -> None:
    model, row = build_gpt(TINY, VOCAB, seed=1), draw_tokens(1, 13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(row[:, :-1], row[:, 1:]) / 12
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


SEPARATOR = 0


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
    logits = model.project(model.encode(tokens_BT, documents_BT=mark_documents(tokens_BT)))
    return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="none").view(targets_BT.shape)


def test_a_document_has_the_same_losses_alone_as_between_others() -> None:
    model, documents = build_wild(), draw_documents(4, 5, 3)
    tokens = torch.cat(documents)[None]
    targets = torch.cat([tokens[:, 1:], torch.tensor([[SEPARATOR]])], dim=1)
    together = compute_losses(model, tokens, targets)
    alone = [
        F.cross_entropy(model.logits(part[None])[0], torch.cat([part[1:], torch.tensor([SEPARATOR])]), reduction="none")
        for part in documents
    ]
    torch.testing.assert_close(together[0], torch.cat(alone))
    summed = model(tokens, targets, 0.0, mark_documents(tokens))
    torch.testing.assert_close(summed, torch.cat(alone).sum())


def test_changing_one_document_moves_no_other_s_loss() -> None:
    model, documents = build_wild(), draw_documents(4, 5, 3)
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
    torch.testing.assert_close(model.encode(tokens, documents_BT=documents), model.encode(tokens))
