"""Validation loss: the mean over fixed windows, whatever the batches and however many ranks share the work."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from gptmill.config.requests import PrepareRequest
from gptmill.config.run import EvaluationConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from gptmill.data.batches.validation_windows import ValWindows
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.evals.loss import ValidationLoss
from gptmill.models.gpt import GPT, build_gpt, pad_vocab
from gptmill.models.losses import IGNORE_INDEX, LossConfig
from gptmill.runs.events import EvalDone
from gptmill.runtime.world import World

CONTEXT = 16
CPU = torch.device("cpu")
CONFIG = RunConfig(
    model=ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=CONTEXT),
    training=TrainingConfig(mini_batch_size=4),
    evaluation=EvaluationConfig(eval_tokens=37 * CONTEXT),
)


@pytest.fixture
def shards(text_file: Path, tmp_path: Path) -> TokenShards:
    request = PrepareRequest(out=str(tmp_path / "shards"), tokenizer="byte", val_fraction=0.2, shard_tokens=1003)
    return open_shards(prepare_corpus([str(text_file)], request, lambda _: None)[0])


@pytest.fixture
def model(shards: TokenShards) -> GPT:
    model = build_gpt(CONFIG.model, pad_vocab(shards.tokenizer.vocab_size), seed=1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


@torch.no_grad()
def evaluate(model: GPT, shards: TokenShards, config: RunConfig = CONFIG, rank: int = 0, size: int = 1) -> EvalDone:
    return ValidationLoss(config, Corpora((shards,)), World(rank, size, CPU)).evaluate(model, step=3)


def with_batches_of(size: int) -> RunConfig:
    return replace(CONFIG, training=replace(CONFIG.training, mini_batch_size=size))


@torch.no_grad()
def compute_loss(model: GPT, shards: TokenShards, num_chosen: int) -> float:
    """The plain way: the chosen windows one by one, in double precision."""
    windows = [
        torch.from_numpy(array[start : start + CONTEXT + 1].astype(np.int64))
        for array in shards.val
        for start in range(0, len(array) - CONTEXT, CONTEXT)
    ]
    chosen = [windows[number * len(windows) // num_chosen] for number in range(num_chosen)]
    losses = [F.cross_entropy(model.logits(row[None, :-1])[0].double(), row[1:]).item() for row in chosen]
    return sum(losses) / len(losses)


def test_the_loss_is_the_mean_over_the_chosen_windows(model: GPT, shards: TokenShards) -> None:
    done = evaluate(model, shards)
    assert done.val_loss == pytest.approx(compute_loss(model, shards, 37), rel=1e-5)
    assert (done.step, done.tokens) == (3, 37 * CONTEXT)


def test_asking_for_more_than_there_is_scores_the_whole_split_once(model: GPT, shards: TokenShards) -> None:
    num_windows = shards.cut(shards.val, CONTEXT).num_windows
    done = evaluate(model, shards, replace(CONFIG, evaluation=EvaluationConfig(eval_tokens=10**9)))
    assert done.tokens == num_windows * CONTEXT
    assert done.val_loss == pytest.approx(compute_loss(model, shards, num_windows), rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5, 37, 64])
def test_the_loss_does_not_depend_on_the_mini_batch_size(model: GPT, shards: TokenShards, size: int) -> None:
    expected = evaluate(model, shards)
    done = evaluate(model, shards, with_batches_of(size))
    assert done.val_loss == pytest.approx(expected.val_loss, rel=1e-5)
    assert done.tokens == expected.tokens


def test_what_only_training_minimises_is_left_out(model: GPT, shards: TokenShards) -> None:
    expected = evaluate(model, shards).val_loss
    model.loss_config = LossConfig(label_smoothing=0.3, z_loss=0.1)
    assert evaluate(model, shards).val_loss == expected


def test_a_model_tells_the_losses_of_corpora_apart(model: GPT, shards: TokenShards, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("zyxw vut srq\n" * 900, encoding="utf-8")
    request = PrepareRequest(out=str(tmp_path / "other"), tokenizer="byte", val_fraction=0.2)
    other = open_shards(prepare_corpus([str(tmp_path / "other.txt")], request, lambda _: None)[0])
    mixture = Corpora((shards, other), (Fraction(2), Fraction(1)))
    counts = mixture.mixture.count(37)
    model.loss_config = LossConfig(num_domains=2)
    with torch.no_grad():
        done = ValidationLoss(CONFIG, mixture, World(0, 1, CPU)).evaluate(model, step=3)
    for part, count in zip(mixture.shards, counts, strict=True):
        assert done.by_corpus[part.location] == pytest.approx(compute_loss(model, part, count), rel=1e-5)


@pytest.mark.parametrize(("max_steps", "compiles"), [(20, False), (2000, True), (None, True)])
def test_only_runs_with_many_evaluations_compile_the_model_for_them(
    model: GPT, shards: TokenShards, max_steps: int | None, compiles: bool
) -> None:
    expected = evaluate(model, shards).val_loss
    model.compile_parts(backend="eager")
    evaluation, training = replace(CONFIG.evaluation, eval_freq=100), replace(CONFIG.training, max_steps=max_steps)
    config = replace(CONFIG, evaluation=evaluation, training=training, machine=MachineConfig(compile=True))
    torch._dynamo.reset()
    counters.clear()
    try:
        assert evaluate(model, shards, config).val_loss == pytest.approx(expected, rel=1e-6)
        assert bool(counters["stats"]) is compiles
    finally:
        torch._dynamo.reset()


def test_the_loss_is_the_same_every_time(model: GPT, shards: TokenShards) -> None:
    assert evaluate(model, shards).val_loss == evaluate(model, shards).val_loss


@pytest.mark.parametrize("size", [2, 3, 16])
def test_the_shares_of_all_ranks_add_up_to_the_whole(model: GPT, shards: TokenShards, size: int) -> None:
    # Without a process group nothing is summed, so that each rank's loss is its own share of the whole.
    shares = [evaluate(model, shards, rank=rank, size=size) for rank in range(size)]
    assert sum(share.val_loss for share in shares) == pytest.approx(evaluate(model, shards).val_loss, rel=1e-5)
    assert {share.tokens for share in shares} == {37 * CONTEXT}


@pytest.mark.parametrize("size", [2, 3, 16])
def test_every_rank_runs_the_same_number_of_batches_of_one_shape(model: GPT, shards: TokenShards, size: int) -> None:
    shapes: list[tuple[int, torch.Size]] = []
    for rank in range(size):
        handle = model.register_forward_pre_hook(lambda _, inputs, rank=rank: shapes.append((rank, inputs[0].shape)))
        evaluate(model, shards, rank=rank, size=size)
        handle.remove()
    counts = {sum(owner == rank for owner, _ in shapes) for rank in range(size)}
    assert len(counts) == 1
    assert {shape for _, shape in shapes} == {(4, CONTEXT)}


@pytest.mark.parametrize(("size", "batch_size"), [(2, 4), (2, 1), (3, 5), (2, 64)])
def test_ranks_read_each_chosen_window_exactly_once(
    model: GPT, shards: TokenShards, size: int, batch_size: int
) -> None:
    read: list[list[int]] = []

    def remember(_: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        tokens, targets = inputs
        read.extend(tokens[(targets != IGNORE_INDEX).all(dim=1)].tolist())

    handle = model.register_forward_pre_hook(remember)
    for rank in range(size):
        evaluate(model, shards, with_batches_of(batch_size), rank, size)
    handle.remove()
    chosen = ValWindows(Corpora((shards,)), CONTEXT, 37).read(0, 37).tokens[:, :-1].tolist()
    assert sorted(read) == sorted(chosen)
