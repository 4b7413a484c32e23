"""Continuations of one context share its row, and are as likely as by themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmill.config.model import ModelConfig, RmsNorm, Rope, SwiGlu
from gptmill.data.tokenizers import build_tokenizer
from gptmill.evals.likelihood import LikelihoodScorer
from gptmill.evals.prompts import Request
from gptmill.evals.request_encoding import Sequences
from gptmill.evals.token_rows import lay_out_rows
from gptmill.models.gpt import GPT, build_gpt, pad_vocab
from gptmill.runtime.world import World

BASE = {"num_layers": 2, "embd_size": 32, "num_heads": 4, "context_length": 64}
MODERN = {"norm": RmsNorm(), "positions": Rope(), "num_kv_heads": 2, "qk_norm": True, "value_embeddings": 1}
MODELS = {
    "classic": ModelConfig(**BASE),  # type: ignore[arg-type]
    "modern": ModelConfig(**BASE, **MODERN, feed_forward=SwiGlu(), attention_windows="9,full"),  # type: ignore[arg-type]
}
REQUESTS = [
    Request("a sentence that goes on", " as it began"),
    Request("a sentence that goes on", "!"),
    Request("a sentence that goes on", " in quite another way"),
    Request("a sentence that goes on", " and on and on and on and on"),  # does not fit into the row of the others
    Request("short", " too"),
    Request("short", " or not"),
    Request("x" * 70, " is cropped"),
    Request("", "nothing before it"),
]


@pytest.mark.parametrize("name", MODELS)
def test_a_shared_context_changes_no_likelihood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer("byte", ())
    model = build_gpt(MODELS[name], pad_vocab(tokenizer.vocab_size), seed=0, vocab_size=tokenizer.vocab_size).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    shapes: list[tuple[int, ...]] = []
    model.token_embedding.register_forward_pre_hook(lambda _module, tokens: shapes.append(tokens[0].shape))
    scorer = LikelihoodScorer(model, tokenizer, World(0, 1, torch.device("cpu")), batch_tokens=150)
    shared = scorer.score(REQUESTS)
    num_shared, shapes[:] = sum(height * width for height, width in shapes), []
    monkeypatch.setattr(GPT, "takes_branches", False)
    alone = scorer.score(REQUESTS)
    np.testing.assert_allclose(shared.logprobs, alone.logprobs, rtol=1e-5)
    assert shared.is_greedy.tolist() == alone.is_greedy.tolist()
    assert shared.num_cropped == alone.num_cropped == 1
    assert num_shared < 0.85 * sum(height * width for height, width in shapes)


def test_rows_hold_a_context_once_and_every_token_that_predicts() -> None:
    context = np.arange(100, 110)
    ids = [np.array([*context, 1, 2, 3]), np.array([*context, 4]), np.array([*context, 5, 6]), np.array([7, 8, 9])]
    sequences = Sequences(ids, np.array([3, 1, 2, 2]), 0)
    rows = lay_out_rows(sequences, 13, shares_contexts=True)
    assert rows.has_branches
    assert rows.lengths.tolist() == [13, 2]  # the last token of each continuation is left out
    assert rows.ids.tolist() == [*context, 1, 2, 5, 7, 8]
    assert rows.positions.tolist() == [*range(10), 10, 11, 10, 0, 1]
    assert rows.branches.tolist() == [1] * 10 + [2, 2, 4, 1, 2]
    assert rows.scored.tolist() == [6, 2]
    assert rows.columns.tolist() == [9, 10, 11, 9, 9, 12, 0, 1]
    assert rows.targets.tolist() == [1, 2, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize(("max_length", "lengths"), [(12, [12, 11, 2]), (1000, [13, 2])])
def test_no_row_is_longer_than_the_context(max_length: int, lengths: list[int]) -> None:
    context = np.arange(100, 110)
    ids = [np.array([*context, 1, 2, 3]), np.array([*context, 4]), np.array([*context, 5, 6]), np.array([7, 8, 9])]
    sequences = Sequences(ids, np.array([3, 1, 2, 2]), 0)
    assert lay_out_rows(sequences, max_length, shares_contexts=True).lengths.tolist() == lengths
    alone = lay_out_rows(sequences, max_length, shares_contexts=False)
    assert alone.lengths.tolist() == [12, 10, 11, 2]
    assert not alone.has_branches
