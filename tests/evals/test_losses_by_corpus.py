"""Validation of a mixture: the mean loss of each corpus beside that of all."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from gptmill.config.requests import PrepareRequest
from gptmill.config.run import EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from gptmill.data.batches.validation_windows import ValWindows
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.evals.loss import ValidationLoss
from gptmill.models.gpt import GPT
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runs.events import EvalDone
from gptmill.runtime.world import World

CONTEXT = 16
CONFIG = RunConfig(
    model=ModelConfig(context_length=CONTEXT),
    training=TrainingConfig(mini_batch_size=4),
    evaluation=EvaluationConfig(eval_tokens=37 * CONTEXT),
)


class Sums(NamedTuple):
    """What a model says of a batch."""

    cross_entropy: Tensor
    per_domain_G: Tensor | None


class Taster(nn.Module):
    """Its loss of a target is the target's number, so that every text has a loss that can be told without a model."""

    def __init__(self, num_domains: int) -> None:
        super().__init__()
        self.num_domains = num_domains

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None, domains_B: Tensor | None
    ) -> Sums:
        assert documents_BT is None or documents_BT.shape == tokens_BT.shape
        losses_B = targets_BT.where(targets_BT != IGNORE_INDEX, 0).sum(dim=1).float()
        if not self.num_domains:
            return Sums(losses_B.sum(), None)
        assert domains_B is not None
        return Sums(losses_B.sum(), torch.zeros(self.num_domains).index_add_(0, domains_B, losses_B))


def prepare(folder: Path, text: str) -> TokenShards:
    source = folder.with_suffix(".txt")
    source.write_text(text, encoding="utf-8")
    request = PrepareRequest(out=str(folder), tokenizer="byte", val_fraction=0.2)
    return open_shards(prepare_corpus([str(source)], request, lambda _: None)[0])


@pytest.fixture
def mixture(tmp_path: Path) -> Corpora:
    parts = tuple(prepare(tmp_path / letter, f"{letter}{letter.upper()} {letter}\n" * 2000) for letter in "az")
    return Corpora(parts, (Fraction(3), Fraction(1)))


def evaluate(corpora: Corpora, num_domains: int, config: RunConfig = CONFIG, rank: int = 0, size: int = 1) -> EvalDone:
    evaluator = ValidationLoss(config, corpora, World(rank, size, torch.device("cpu")))
    return evaluator.evaluate(cast(GPT, Taster(num_domains)), step=3)


def compute_means(corpora: Corpora, num_windows: int) -> dict[str, float]:
    """The plain way: the chosen windows one by one."""
    windows = ValWindows(corpora, CONTEXT, num_windows)
    turns, _ = corpora.mixture.assign(0, num_windows)
    means = {}
    for corpus, shards in enumerate(corpora.shards):
        rows = [windows.read(number, 1).tokens[0, 1:] for number in range(num_windows) if turns[number] == corpus]
        means[shards.location] = torch.stack(rows).double().mean().item()
    return means


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_the_loss_of_each_corpus_is_the_mean_over_its_windows(mixture: Corpora, batch_size: int) -> None:
    config = replace(CONFIG, training=replace(CONFIG.training, mini_batch_size=batch_size))
    done = evaluate(mixture, 2, config)
    assert done.by_corpus == pytest.approx(compute_means(mixture, 37))
    low, high = done.by_corpus.values()
    assert low < done.val_loss < high


def test_all_together_are_the_loss(mixture: Corpora) -> None:
    done = evaluate(mixture, 2)
    counts = mixture.mixture.count(37)
    parts = [count * loss for count, loss in zip(counts, done.by_corpus.values(), strict=True)]
    assert done.val_loss == pytest.approx(sum(parts) / 37)


@pytest.mark.parametrize("size", [2, 16])
def test_the_shares_of_all_ranks_add_up_to_each_corpus(mixture: Corpora, size: int) -> None:
    # Without a process group nothing is summed, so that each rank's losses are its own share of the whole.
    ranks = [evaluate(mixture, 2, rank=rank, size=size) for rank in range(size)]
    for address, loss in evaluate(mixture, 2).by_corpus.items():
        assert sum(done.by_corpus.get(address, 0.0) for done in ranks) == pytest.approx(loss)


def test_a_single_corpus_has_no_losses_apart(mixture: Corpora) -> None:
    assert evaluate(Corpora(mixture.shards[:1]), 0).by_corpus == {}


def test_a_corpus_too_light_for_a_window_is_left_out(mixture: Corpora) -> None:
    few = replace(CONFIG, evaluation=EvaluationConfig(eval_tokens=CONTEXT))
    assert list(evaluate(mixture, 2, few).by_corpus) == [mixture.shards[0].location]


def test_a_model_that_keeps_no_groups_apart_tells_none(mixture: Corpora) -> None:
    done = evaluate(mixture, 0)
    assert done.by_corpus == {}
    assert done.val_loss == evaluate(mixture, 2).val_loss
