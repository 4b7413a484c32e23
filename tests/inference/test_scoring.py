"""Scores by loss: the mean over each document's tokens, whatever the batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.config.run import ModelConfig
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.inference.loading import LoadedModel
from gptmill.inference.scoring import score_by_loss
from gptmill.models.gpt import GPT, build_gpt, pad_vocab

CONTEXT = 32


def prepare(folder: Path, tokenizer: str) -> TokenShards:
    source = folder / "text"
    source.mkdir(exist_ok=True)
    for number in range(40):
        (source / f"{number:03d}.txt").write_text(("abcdefghij " * 20)[: 2 + 23 * number % 130], encoding="utf-8")
    request = PrepareRequest(
        out=str(folder / tokenizer), tokenizer=tokenizer, val_fraction=0.1, split="tail", shard_tokens=100_000
    )
    return open_shards(prepare_corpus([str(source)], request, lambda _progress: None)[0])


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return prepare(tmp_path, "byte")


@pytest.fixture
def loaded(shards: TokenShards) -> LoadedModel:
    tokenizer = shards.tokenizer
    config = ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=CONTEXT)
    model = build_gpt(config, pad_vocab(tokenizer.vocab_size), seed=1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return LoadedModel(model, tokenizer, 0)


@torch.no_grad()
def compute_loss(model: GPT, document: list[int], end_of_text: int) -> float:
    """The plain way: one piece after another."""
    total, closed = 0.0, [*document, end_of_text]
    for start in range(0, len(document), CONTEXT):
        piece = torch.tensor(closed[start : start + CONTEXT + 1])
        total += F.cross_entropy(model.logits(piece[None, :-1])[0].double(), piece[1:], reduction="sum").item()
    return total / len(document)


def test_a_score_is_the_mean_loss_of_its_document(loaded: LoadedModel, shards: TokenShards) -> None:
    told: list[tuple[int, int]] = []
    scores = score_by_loss(loaded, shards, lambda done, total: told.append((done, total)))
    tokens = np.concatenate(shards.train)
    end = shards.tokenizer.end_of_text
    documents = np.split(tokens, np.flatnonzero(tokens == end)[1:])
    expected = [compute_loss(loaded.model, document.tolist(), end) for document in documents]
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    assert told[-1] == (len(tokens), len(tokens))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_corpus_of_another_tokenizer_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer mismatch"):
        score_by_loss(loaded, prepare(tmp_path, "char"), lambda _done, _total: None)
