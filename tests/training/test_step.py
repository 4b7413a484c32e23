"""One optimizer step against the same step computed by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, Tiny, make_shards, open_tiny
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gptmill.data.batches.data_loader import open_data_loader
from gptmill.data.shards.opening import TokenShards
from gptmill.evals.loss import ValidationLoss
from gptmill.models.gpt import GPT
from gptmill.models.language_model import Losses
from gptmill.runtime.signals import StopFlag
from gptmill.training.schedules import make_lr
from gptmill.training.step import train_step

# AdamW's first update is lr * g / (|g| + eps): an eps above the rounding noise of g keeps the noise out of it.
SMOOTH: dict[str, Any] = {"eps": 1e-3, "max_lr": 1e-3, "warmup_steps": 0}


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def compute_by_hand(tiny: Tiny, label_smoothing: float = 0.0) -> tuple[float, dict[str, Tensor]]:
    """(mean loss, gradients) of the next step's windows, all in one batch, on a copy of the model."""
    model: GPT = copy.deepcopy(tiny.state.model)
    batch = tiny.read_next_batch()
    log_probabilities = model.logits(batch.tokens)[..., : tiny.corpora.tokenizer.vocab_size].log_softmax(dim=-1)
    hard = -log_probabilities.gather(2, batch.targets[..., None]).mean()
    even = -log_probabilities.mean()
    ((1 - label_smoothing) * hard + label_smoothing * even).backward()
    return hard.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compute_norm(gradients: dict[str, Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()


def copy_everything(tiny: Tiny) -> dict[str, Tensor]:
    """Parameters, moments and the optimizer's counters."""
    live = tiny.state.make_checkpoint({}).tensors["optimizer"]
    moments = {name: tensor.clone() for name, tensor in live.items()}
    return {**tiny.copy_parameters(), **moments}


def poison(tiny: Tiny, value: float) -> RemovableHandle:
    """One element of one gradient becomes `value`, in every step until the handle is removed."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[3] = value
        return spoilt

    return next(tiny.state.model.parameters()).register_hook(spoil)


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("mini_batch_size", [4, 2, 1])
def test_micro_batches_add_up_to_the_whole_batch(shards: TokenShards, mini_batch_size: int) -> None:
    whole = open_tiny(shards, mini_batch_size=8, **SMOOTH)
    parts = open_tiny(shards, mini_batch_size=mini_batch_size, **SMOOTH)
    assert (whole.plan.micro_batches, parts.plan.micro_batches) == (1, 8 // mini_batch_size)
    for _ in range(3):
        loss, norm, *_ = whole.step().read()
        assert parts.step().read()[:2] == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5))
    expected = whole.copy_parameters()
    for name, parameter in parts.copy_parameters().items():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_and_the_norm_are_those_of_the_whole_batch(shards: TokenShards, label_smoothing: float) -> None:
    tiny = open_tiny(shards, mini_batch_size=2, label_smoothing=label_smoothing)
    for _ in range(3):
        loss, gradients = compute_by_hand(tiny, label_smoothing)
        read_loss, read_norm, *_ = tiny.step().read()
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
    _, read_norm, *_ = tiny.step().read()
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
        (adamw,) = tiny.state.optimizer.members
        assert {group["lr"] for group in adamw.param_groups} == {stats.lr}


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


@pytest.mark.slow
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


def test_label_smoothing_changes_the_objective_and_not_the_validation_loss(shards: TokenShards) -> None:
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
    before, after = plain.step().read(), smoothed.step().read()
    assert before.objective == before.loss == after.loss
    assert after.objective > after.loss + 1e-3


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


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("guard", ["warn", "rollback"])
def test_an_update_that_is_not_finite_leaves_everything_as_it_was(
    shards: TokenShards, guard: str, precision: str, value: float
) -> None:
    tiny = open_tiny(shards, guard=guard, precision=precision)
    for _ in range(2):
        tiny.step()
    before = copy_everything(tiny)
    assert any(name.endswith("/step") for name in before)
    handle = poison(tiny, value)
    metrics = tiny.step().read()
    assert math.isfinite(metrics.loss)
    assert not math.isfinite(metrics.grad_norm)
    assert metrics.is_overflow == (precision == "fp16")
    assert are_equal(copy_everything(tiny), before)
    assert (tiny.state.step, tiny.state.windows_read) == (3, 24)
    handle.remove()
    assert math.isfinite(tiny.step().read().grad_norm)
    assert not are_equal(copy_everything(tiny), before)


def test_the_very_first_update_can_be_left_out(shards: TokenShards) -> None:
    tiny, clean = open_tiny(shards), open_tiny(shards)
    handle = poison(tiny, math.nan)
    tiny.step()
    handle.remove()
    clean.state.step, clean.state.windows_read = 1, 8
    tiny.step()
    clean.step()
    assert are_equal(copy_everything(tiny), copy_everything(clean))


@pytest.mark.parametrize("part", ["cross_entropy", "objective"])
def test_a_loss_that_is_not_finite_is_enough(shards: TokenShards, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The gradients of a loss may be finite where it is not, as of one that has an infinite constant in it."""
    tiny = open_tiny(shards)
    tiny.step()
    before, forward = copy_everything(tiny), tiny.state.model.forward

    def add_infinity(*inputs: Any) -> Losses:
        losses: Losses = forward(*inputs)
        return losses._replace(**{part: getattr(losses, part) + math.inf})

    monkeypatch.setattr(tiny.state.model, "forward", add_infinity)
    metrics = tiny.step().read()
    assert math.isinf(getattr(metrics, "loss" if part == "cross_entropy" else part))
    assert math.isfinite(metrics.grad_norm)
    assert are_equal(copy_everything(tiny), before)


def test_without_the_guard_a_poisoned_update_is_done(shards: TokenShards) -> None:
    tiny = open_tiny(shards, guard="off")
    poison(tiny, math.nan)
    tiny.step()
    assert any(parameter.isnan().any() for parameter in tiny.copy_parameters().values())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_guard_changes_no_bit_of_a_finite_step(shards: TokenShards, precision: str) -> None:
    guarded, free = (open_tiny(shards, guard=guard, precision=precision) for guard in ("rollback", "off"))
    for _ in range(4):
        assert guarded.step().read() == free.step().read()
    assert are_equal(copy_everything(guarded), copy_everything(free))


def test_an_fp16_gradient_that_stays_infinite_is_no_overflow_for_ever(shards: TokenShards) -> None:
    tiny = open_tiny(shards, precision="fp16")
    poison(tiny, math.inf)
    metrics = [tiny.step().read() for _ in range(18)]
    assert [entry.scale for entry in metrics] == [2.0**power for power in range(16, -2, -1)]
    assert [entry.is_overflow for entry in metrics] == [True] * 16 + [False] * 2


def test_a_step_jumps_over_what_is_left_out(shards: TokenShards) -> None:
    straight, jumping = open_tiny(shards), open_tiny(shards)
    jumping.state.skipped_windows = [(10, 21)]
    assert (straight.step().windows, jumping.step().windows) == ((0, 8), (0, 8))
    straight.state.windows_read = 21
    seen = straight.read_next_batch().tokens
    assert jumping.read_next_batch().tokens.equal(seen)
    jumped, same = jumping.step(), straight.step()
    assert jumped.windows == same.windows == (21, 29)
    assert jumped.read() == same.read()
    assert jumping.state.windows_read == 29


def test_a_step_that_gets_no_data_leaves_the_position(shards: TokenShards) -> None:
    tiny = open_tiny(shards)
    tiny.state.skipped_windows = [(0, 8)]
    with (
        open_data_loader(tiny.sampler, tiny.reader, CPU.device, []) as loader,
        pytest.raises(EOFError),
    ):
        train_step(tiny.state, loader, tiny.config, tiny.plan, CPU, StopFlag())
    assert (tiny.state.step, tiny.state.windows_read) == (0, 0)


def test_a_step_says_what_it_is_about_to_do(shards: TokenShards) -> None:
    tiny, phases = open_tiny(shards), list[str]()
    with open_data_loader(tiny.sampler, tiny.reader, CPU.device, [0, 4]) as loader:
        train_step(tiny.state, loader, tiny.config, tiny.plan, CPU, StopFlag(), phases.append)
    assert phases == ["waiting for data", "computing"] * 2
