"""The loss on training windows beside the validation loss: which windows, and that training is not changed by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import EXACT_FLAGS, GptMill
from torch import Tensor

from gptmill.config.requests import PrepareRequest
from gptmill.config.run import DataConfig, EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.batches.training_windows import TrainWindows
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import open_shards
from gptmill.evals.loss import TrainingLoss
from gptmill.models.gpt import GPT, build_gpt, pad_vocab
from gptmill.runs.checkpoints.storage import load_checkpoint
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, StepLogged, TrainEvalDone
from gptmill.runtime.world import World

CONTEXT = 16
CPU = torch.device("cpu")
CONFIG = RunConfig(
    model=ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=CONTEXT, dropout=0.1),
    training=TrainingConfig(mini_batch_size=4),
    evaluation=EvaluationConfig(eval_tokens=10 * CONTEXT),
)


@pytest.fixture
def corpora(text_file: Path, tmp_path: Path) -> Corpora:
    request = PrepareRequest(out=str(tmp_path / "shards"), tokenizer="byte", val_fraction=0.2, shard_tokens=1003)
    return Corpora((open_shards(prepare_corpus([str(text_file)], request, lambda _: None)[0]),))


@pytest.fixture
def model(corpora: Corpora) -> GPT:
    return build_gpt(CONFIG.model, pad_vocab(corpora.tokenizer.vocab_size), seed=1).eval()


@torch.no_grad()
def evaluate(model: GPT, corpora: Corpora, config: RunConfig = CONFIG, world: World | None = None) -> TrainEvalDone:
    return TrainingLoss(config, corpora, world or World(0, 1, CPU)).evaluate(model, step=3)


@torch.no_grad()
def compute_loss(model: GPT, corpora: Corpora, config: RunConfig, num_windows: int) -> float:
    """The plain way: the windows that the run trains on first, one by one."""
    sampler, losses = build_sampler(config, corpora), list[float]()
    for first in range(0, num_windows, 4):
        found = sampler.find(first)
        for shard, start in zip(found.shards, found.starts, strict=True):
            array = corpora.shards[0].train[int(shard)]
            row = torch.from_numpy(array[start : start + CONTEXT + 1].astype(np.int64))
            losses.append(F.cross_entropy(model.logits(row[None, :-1])[0].double(), row[1:]).item())
    return sum(losses[:num_windows]) / num_windows


@pytest.mark.parametrize("data", [DataConfig(), DataConfig(order="sequential")], ids=["shuffle", "sequential"])
def test_it_is_the_loss_on_the_first_windows_of_the_run(model: GPT, corpora: Corpora, data: DataConfig) -> None:
    config = replace(CONFIG, data=data)
    done = evaluate(model, corpora, config)
    assert done.train_loss == pytest.approx(compute_loss(model, corpora, config, 10), rel=1e-5)
    assert (done.step, done.tokens) == (3, 10 * CONTEXT)


def test_ranks_share_the_windows(model: GPT, corpora: Corpora, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = evaluate(model, corpora).train_loss, list[Tensor]()

    def keep(_world: World, sums: Tensor) -> Tensor:
        parts.append(sums[:, 0])
        return sums

    monkeypatch.setattr(World, "sum_over_data", keep)
    for rank in range(2):
        evaluate(model, corpora, world=World(rank, 2, CPU))
    assert float(sum(part.sum() for part in parts)) / (10 * CONTEXT) == pytest.approx(whole, rel=1e-5)


def test_whole_documents_are_evaluated_in_windows_and_a_small_corpus_once(model: GPT, corpora: Corpora) -> None:
    config = replace(CONFIG, data=DataConfig(documents="whole"))
    assert evaluate(model, corpora, config).tokens == 10 * CONTEXT
    windows = TrainWindows(config, corpora, 10**9)
    assert windows.num_chosen == corpora.shards[0].cut(corpora.shards[0].train, CONTEXT).num_windows


def test_training_is_the_same_to_the_bit_with_and_without_it(straight: Path, gptmill: GptMill) -> None:
    """Whatever is sampled, too: dropout, data order and updates are those of a run without evaluations."""
    observed = "--eval_train --num_samples 3 --sample_tokens 40 --print_freq 1 --run_name observed".split()
    shown = gptmill("train", *EXACT_FLAGS, *observed).stdout
    run = straight.parent / "observed"
    for kind, name in ((StepLogged, "loss"), (StepLogged, "grad_norm"), (EvalDone, "val_loss")):
        values = [
            [
                (event.step, getattr(event, name))
                for event in read_events(folder / "events.jsonl")
                if type(event) is kind
            ]
            for folder in (straight, run)
        ]
        assert values[0] == values[1]
    tensors = [
        load_checkpoint(folder / "checkpoints/latest", ("model", "optimizer")).tensors for folder in (straight, run)
    ]
    for group, named in tensors[0].items():
        assert all(torch.equal(tensor, tensors[1][group][name]) for name, tensor in named.items())
    lines = (run / "log.txt").read_text().splitlines()
    assert [line for line in lines if "train_eval" not in line] == (straight / "log.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines if "train_eval" in line] == [
        [str(step), "train_eval"] for step in range(0, 41, 10)
    ]
    assert shown.count("> rank 0 sample 2: Hello") == 5
    assert shown.count("\nstep 7/40 | ") == 1, "a line for every step"
