"""One optimizer step against the same step computed by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, Tiny, make_shards, open_tiny
from torch import Tensor

from gptmill.data.shards.opening import TokenShards
from gptmill.evals.loss import ValidationLoss
from gptmill.models.gpt import GPT
from gptmill.runtime.signals import StopFlag
from gptmill.training.schedules import make_lr

# AdamW's first update is lr * g / (|g| + eps): an eps above the rounding noise of g keeps the noise out of it.
SMOOTH: dict[str, Any] = {"eps": 1e-3, "max_lr": 1e-3, "warmup_steps": 0}


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def compute_by_hand(tiny: Tiny, label_smoothing: float = 0.0) -> tuple[float, dict[str, Tensor]]:
    """(mean loss, gradients) of the next step's windows, all in one batch, on a copy of the model."""
    model: GPT = copy.deepcopy(tiny.state.model)
    batch = tiny.read_next_batch()
    log_probabilities = model.logits(batch.tokens).log_softmax(dim=-1)
    hard = -log_probabilities.gather(2, batch.targets[..., None]).mean()
    even = -log_probabilities[..., : tiny.corpora.tokenizer.vocab_size].mean()
    loss = (1 - label_smoothing) * hard + label_smoothing * even
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compute_norm(gradients: dict[str, Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("mini_batch_size", [4, 2, 1])
def test_micro_batches_add_up_to_the_whole_batch(shards: TokenShards, mini_batch_size: int) -> None:
    whole = open_tiny(shards, mini_batch_size=8, **SMOOTH)
    parts = open_tiny(shards, mini_batch_size=mini_batch_size, **SMOOTH)
    assert (whole.plan.micro_batches, parts.plan.micro_batches) == (1, 8 // mini_batch_size)
    for _ in range(3):
        loss, norm, _ = whole.step().read()
        assert parts.step().read() == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5), False)
    expected = whole.copy_parameters()
    for name, parameter in parts.copy_parameters().items():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_and_the_norm_are_those_of_the_whole_batch(shards: TokenShards, label_smoothing: float) -> None:
    tiny = open_tiny(shards, mini_batch_size=2, label_smoothing=label_smoothing)
    for _ in range(3):
        loss, gradients = compute_by_hand(tiny, label_smoothing)
        read_loss, read_norm, _ = tiny.step().read()
        assert read_loss == pytest.approx(loss, rel=1e-5)
        assert read_norm == pytest.approx(compute_norm(gradients), rel=1e-4)


@pytest.mark.parametrize("grad_clip", [0.05, 0.5, 1e6, None])
def test_the_update_is_adamw_s_with_the_clipped_gradient(shards: TokenShards, grad_clip: float | None) -> None:
    tiny = open_tiny(shards, grad_clip=grad_clip, weight_decay=0.1, **SMOOTH)
    before = tiny.copy_parameters()
    _, gradients = compute_by_hand(tiny)
    norm = compute_norm(gradients)
    shrink = 1.0 if grad_clip is None else min(1.0, grad_clip / norm)
    assert (shrink < 1) == (grad_clip in (0.05, 0.5))
    _, read_norm, _ = tiny.step().read()
    assert read_norm == pytest.approx(norm, rel=1e-4)  # the norm from before clipping
    for name, parameter in tiny.copy_parameters().items():
        gradient = gradients[name] * shrink
        decay = 1e-3 * 0.1 if gradient.dim() == 2 else 0.0
        expected = before[name] * (1 - decay) - 1e-3 * gradient / (gradient.abs() + 1e-3)
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6, msg=name)


def test_every_step_uses_the_rate_of_its_place(shards: TokenShards) -> None:
    tiny = open_tiny(shards, warmup_steps=3, max_steps=6)
    for done in range(6):
        stats = tiny.step()
        assert stats.step == done + 1
        assert stats.lr == make_lr(done, tiny.config.optimizer, 6)
        assert {group["lr"] for group in tiny.state.optimizer.param_groups} == {stats.lr}


def test_a_step_reads_the_next_windows_and_leaves_no_gradient(shards: TokenShards) -> None:
    tiny = open_tiny(shards)
    seen = []
    for step in range(1, 4):
        seen.append(tiny.read_next_batch().tokens)
        tiny.step()
        assert (tiny.state.step, tiny.state.windows_read) == (step, 8 * step)
        assert all(parameter.grad is None for parameter in tiny.state.model.parameters())
    assert not seen[0].equal(seen[1])
    assert not seen[1].equal(seen[2])


def test_training_lowers_the_loss(shards: TokenShards) -> None:
    tiny = open_tiny(shards, max_lr=1e-2)
    losses = [tiny.step().read()[0] for _ in range(30)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_lowers_the_loss_in_half_precision(shards: TokenShards, precision: str) -> None:
    tiny = open_tiny(shards, max_lr=1e-2, precision=precision)
    single = open_tiny(shards, max_lr=1e-2, precision="fp32")
    losses = [tiny.step().read()[0] for _ in range(20)]
    assert losses[-1] < losses[0] - 0.5
    assert losses[0] == pytest.approx(single.step().read()[0], rel=1e-2)
    assert {parameter.dtype for parameter in tiny.state.model.parameters()} == {torch.float32}


def test_the_norm_of_an_fp16_step_is_that_of_the_unscaled_gradient(shards: TokenShards) -> None:
    tiny = open_tiny(shards, precision="fp16")
    _, gradients = compute_by_hand(tiny)
    assert tiny.state.scaler.get_scale() > 1000
    assert tiny.step().read()[1] == pytest.approx(compute_norm(gradients), rel=0.02)


def test_an_fp16_step_that_overflows_is_left_out_and_lowers_the_scale(shards: TokenShards) -> None:
    tiny = open_tiny(shards, precision="fp16")
    tiny.step()
    tiny.state.scaler.update(2.0**40)
    before = tiny.copy_parameters()
    tiny.step()
    assert are_equal(tiny.copy_parameters(), before)
    assert tiny.state.scaler.get_scale() == 2.0**39
    assert (tiny.state.step, tiny.state.windows_read) == (2, 16)


def test_label_smoothing_changes_the_training_loss_and_not_the_validation_loss(shards: TokenShards) -> None:
    plain, smoothed = open_tiny(shards), open_tiny(shards, label_smoothing=0.3)
    with torch.no_grad():
        plain_val, smoothed_val = (
            ValidationLoss(tiny.config, tiny.corpora, CPU).evaluate(tiny.state.model, 0).val_loss
            for tiny in (plain, smoothed)
        )
    assert plain_val == smoothed_val
    for tiny in (plain, smoothed):
        for _ in range(10):
            tiny.step()
    smoothed.state.model.load_state_dict(plain.state.model.state_dict())
    assert smoothed.step().read()[0] > plain.step().read()[0] + 1e-3


def test_a_step_with_dropout_is_the_same_when_run_again(shards: TokenShards) -> None:
    first, second = (open_tiny(shards, dropout=0.2) for _ in range(2))
    for _ in range(3):
        loss = first.step().read()[0]
        torch.rand(7)  # randomness drawn in between, as a sample would
        assert second.step().read()[0] == loss
    assert are_equal(first.copy_parameters(), second.copy_parameters())
    assert not are_equal(first.copy_parameters(), open_tiny(shards, dropout=0.2).copy_parameters())


def test_dropout_is_drawn_anew_at_every_step(shards: TokenShards) -> None:
    tiny = open_tiny(shards, dropout=0.5)
    start = copy.deepcopy(tiny.state.model.state_dict())
    losses = []
    for step in (0, 1):
        tiny.state.model.load_state_dict(start)
        tiny.state.step, tiny.state.windows_read = step, 0
        losses.append(tiny.step().read()[0])
    assert losses[0] != losses[1]


@pytest.mark.parametrize(("number", "asked"), [(0, False), (2, True), (15, True)])
def test_the_wish_to_stop_travels_in_the_stats(shards: TokenShards, number: int, asked: bool) -> None:
    assert open_tiny(shards).step(StopFlag(number)).read()[2] is asked
