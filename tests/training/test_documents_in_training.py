"""Training on documents, stages and mixtures: the loss is the mean over all targets of the step, and only them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, Tiny, make_reader, open_tiny
from torch import Tensor

from gptmill.config.requests import PrepareRequest
from gptmill.data.batches.batch import Batch, make_batch
from gptmill.data.batches.data_loader import open_data_loader
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.world import World
from gptmill.training.step import train_step


def prepare(folder: Path, letters: str) -> TokenShards:
    source = folder / f"text-{letters}"
    source.mkdir()
    for number in range(80):
        (source / f"{number:03d}.txt").write_text((letters * 40)[: 3 + 17 * number % 90], encoding="utf-8")
    request = PrepareRequest(
        out=str(folder / letters), tokenizer="byte", val_fraction=0.2, split="tail", shard_tokens=1500
    )
    return open_shards(prepare_corpus([str(source)], request, lambda _progress: None)[0])


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return prepare(tmp_path, "abcde ")


def read_step(tiny: Tiny) -> Iterator[Batch]:
    """The next step's micro-batches."""
    sampler, first = tiny.sampler, tiny.state.windows_read
    for start in range(first, first + tiny.plan.windows_per_step, sampler.samples_per_batch):
        yield make_batch(make_reader(tiny.corpora).read(sampler.find(start)), IGNORE_INDEX, tiny.plan.separator)


@torch.no_grad()
def compute_by_hand(tiny: Tiny) -> float:
    """The mean loss over all valid targets of the next step, row by row."""
    model = tiny.state.model
    losses = []
    for batch in read_step(tiny):
        for row in range(len(batch.tokens)):
            valid = batch.targets[row] != IGNORE_INDEX
            documents = None if batch.documents is None else batch.documents[row : row + 1]
            logits = model.lm_head(model.hidden_states(batch.tokens[row : row + 1], documents_BT=documents))[0]
            logits = logits[:, : model.vocab_size]
            picked = -logits.log_softmax(dim=-1)[valid].gather(1, batch.targets[row][valid][:, None])
            losses.append(picked.flatten())
    return torch.cat(losses).mean().item()


CASES: list[dict[str, Any]] = [
    {"documents": "masked"},
    {"documents": "whole", "context_length": 32, "total_batch_size": 512, "mini_batch_size": 4},
]


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: fields["documents"])
def test_the_loss_is_the_mean_over_the_targets_of_the_step(shards: TokenShards, fields: dict[str, Any]) -> None:
    tiny = open_tiny(shards, **fields)
    for _ in range(3):
        expected = compute_by_hand(tiny)
        targets = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in read_step(tiny))
        stats = tiny.step()
        assert stats.read()[0] == pytest.approx(expected, rel=1e-5)
        assert stats.tokens == targets


def test_ranks_of_whole_documents_divide_by_the_targets_of_all(shards: TokenShards) -> None:
    """Without a process group nothing is summed, so that each rank's loss is its own part of the whole."""
    fields = {"documents": "whole", "context_length": 32, "total_batch_size": 512, "mini_batch_size": 4}
    expected = open_tiny(shards, **fields).step().read()[0]
    parts = []
    for rank in range(2):
        tiny, world = open_tiny(shards, **fields), World(rank, 2, CPU.device)
        plan = replace(tiny.plan, micro_batches=tiny.plan.micro_batches // 2)
        with open_data_loader(tiny.sampler, make_reader(tiny.corpora), CPU.device, count(rank, 2)) as loader:
            stats = train_step(tiny.state, loader, tiny.config, plan, world, StopFlag())
        parts.append(stats.read()[0])
    assert sum(parts) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("documents", ["packed", "masked"])
def test_stages_cut_the_same_windows_shorter(shards: TokenShards, documents: str) -> None:
    tiny = open_tiny(shards, context_warmup="4:2,8:3", documents=documents)
    full = open_tiny(shards, documents=documents)
    shapes: list[tuple[int, ...]] = []
    tokens: list[Tensor] = []

    def remember(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes.append(tuple(inputs[0].shape))
        tokens.append(inputs[0].flatten())

    tiny.state.model.register_forward_pre_hook(remember)
    for _ in range(5):
        assert torch.equal(tiny.read_next_batch().tokens, full.read_next_batch().tokens)
        expected = tiny.read_next_batch().tokens.flatten()
        tokens.clear()
        stats = tiny.step()
        full.step()
        assert stats.tokens == 128
        assert torch.equal(torch.cat(tokens), expected)
        assert tiny.state.windows_read == full.state.windows_read
    assert shapes[::2] == [(16, 4), (16, 4), (8, 8), (4, 16), (4, 16)]


def test_masked_training_differs_from_packed_training(shards: TokenShards) -> None:
    packed, masked = open_tiny(shards), open_tiny(shards, documents="masked")
    assert packed.step().read()[0] != masked.step().read()[0]


def test_the_epoch_is_how_much_was_read_whatever_the_batch_was_before(shards: TokenShards) -> None:
    before = open_tiny(shards, total_batch_size=128)
    for _ in range(3):
        before.step()
    after = open_tiny(shards, total_batch_size=256)
    after.state.step, after.state.windows_read = before.state.step, before.state.windows_read
    windows = shards.cut(shards.train, 16).num_windows
    assert after.step().epoch == pytest.approx((3 * 8 + 16) / windows)


def test_an_epoch_of_a_mixture_is_as_long_as_all_corpora(shards: TokenShards, tmp_path: Path) -> None:
    corpora = Corpora((shards, prepare(tmp_path, "xyz")), (Fraction(1), Fraction(3)))
    tiny = open_tiny(corpora, max_steps=None, num_epochs=2)
    windows = sum(part.cut(part.train, 16).num_windows for part in corpora.shards)
    assert tiny.plan.windows_per_epoch == windows
    assert tiny.plan.max_steps == 2 * windows // 8
    assert tiny.step().read()[0] > 0


def test_an_epoch_of_whole_documents_is_all_their_groups(shards: TokenShards) -> None:
    tiny = open_tiny(shards, documents="whole", max_steps=None, num_epochs=3)
    assert tiny.plan.windows_per_step == tiny.plan.micro_batches == 2
    assert tiny.plan.windows_per_epoch == tiny.sampler.samples_per_epoch
    assert tiny.plan.max_steps == 3 * tiny.sampler.samples_per_epoch // 2
