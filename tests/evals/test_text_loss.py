"""The loss of any text: every token once, as the plain way computes it, and bits per byte for any tokenizer."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.evals.likelihood import LikelihoodScorer
from gptmill.evals.measured_texts import read_text
from gptmill.evals.text_loss import TextScores, list_windows, measure_text
from gptmill.inference.model import Model
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.runtime.world import World

ALONE = World(0, 1, torch.device("cpu"))
CONTEXT = 16
TEXT = "Über den Wolken muß die Freiheit wohl grenzenlos sein. " * 4


def build(tokenizer: Tokenizer) -> GPT:
    torch.manual_seed(1)
    config = ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=CONTEXT)
    model = GPT(config, pad_vocab(tokenizer.vocab_size), tokenizer.vocab_size).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def measure(model: GPT, tokenizer: Tokenizer, ids: list[int], stride: int, separator: int | None = None) -> TextScores:
    scorer = LikelihoodScorer(model, tokenizer, ALONE, batch_tokens=100, separator=separator)
    return measure_text("text", [np.array(ids, dtype=np.uint16)], tokenizer, scorer, CONTEXT, stride)


@pytest.mark.parametrize("stride", [1, 5, 8, 16])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 16, 17, 18, 100])
def test_every_token_but_the_first_counts_once(num_tokens: int, stride: int) -> None:
    counted: list[int] = []
    for window in list_windows(num_tokens, CONTEXT, stride):
        assert window.end - window.start <= CONTEXT
        assert window.end < num_tokens
        counted += range(window.end - window.new + 1, window.end + 1)
        # Beyond the first window, nothing is predicted from less than this.
        assert window.start == 0 or window.end - window.start - window.new >= CONTEXT - stride
    assert counted == [*range(1, num_tokens)]


@pytest.mark.parametrize("stride", [1, 8, 16])
def test_it_is_the_loss_of_the_tokens_one_by_one(stride: int) -> None:
    tokenizer = build_tokenizer("byte", ())
    model = build(tokenizer)
    ids = [tokenizer.end_of_text, *tokenizer.encode(TEXT).tolist()]
    nats = 0.0
    with torch.no_grad():
        for window in list_windows(len(ids), CONTEXT, stride):
            tokens = torch.tensor(ids[window.start : window.end + 1])
            logits = model.logits(tokens[None, :-1])[0, :, : tokenizer.vocab_size].double()
            nats += F.cross_entropy(logits[-window.new :], tokens[-window.new :], reduction="sum").item()
    scores = measure(model, tokenizer, ids, stride)
    assert scores.num_tokens == len(ids) - 1
    assert scores.num_bytes == len(TEXT.encode())
    assert scores.metrics["loss"].value == pytest.approx(nats / scores.num_tokens, rel=1e-5)
    assert scores.metrics["perplexity"].value == pytest.approx(math.exp(nats / scores.num_tokens), rel=1e-5)
    assert scores.metrics["bits_per_byte"].value == pytest.approx(nats / math.log(2) / scores.num_bytes, rel=1e-5)


def test_half_a_context_is_the_loss_of_the_python_model() -> None:
    """Up to the padding of the vocabulary, which is a thousandth of GPT-2's."""
    tokenizer = build_tokenizer("gpt2", ())
    model = build(tokenizer)
    with torch.no_grad():
        model.token_embedding.weight[tokenizer.vocab_size :] = 0.0
    ids = [tokenizer.end_of_text, *tokenizer.encode(TEXT).tolist()]
    scores = measure(model, tokenizer, ids, CONTEXT // 2)
    padded = Model(model, tokenizer, 0).loss(TEXT)  # the padding takes some of the probability
    assert scores.metrics["loss"].value == pytest.approx(padded, rel=1e-2)


def test_bits_per_byte_compare_models_of_different_tokenizers() -> None:
    """Models that know nothing: uniform over 257 bytes, and over GPT-2's vocabulary."""
    bits = {}
    for name in ("byte", "gpt2"):
        tokenizer = build_tokenizer(name, ())
        model = build(tokenizer)
        with torch.no_grad():
            model.final_norm.weight.zero_()
            model.final_norm.bias.zero_()  # type: ignore[union-attr]
        ids = [tokenizer.end_of_text, *tokenizer.encode(TEXT).tolist()]
        scores = measure(model, tokenizer, ids, CONTEXT)
        assert scores.metrics["loss"].value == pytest.approx(math.log(tokenizer.vocab_size), rel=1e-5)
        bits[name] = scores.metrics["bits_per_byte"].value
        assert scores.num_bytes == len(TEXT.encode())
        assert bits[name] == pytest.approx(math.log2(tokenizer.vocab_size) * (len(ids) - 1) / len(TEXT.encode()))
    assert bits["byte"] == pytest.approx(math.log2(257))
    assert bits["gpt2"] < bits["byte"]


def test_masked_documents_do_not_see_each_other() -> None:
    tokenizer = build_tokenizer("byte", ())
    model, end = build(tokenizer), tokenizer.end_of_text
    first, second = tokenizer.encode("abcd").tolist(), tokenizer.encode("wxyz").tolist()
    alone = measure(model, tokenizer, [end, *second], CONTEXT).metrics["loss"].value * 4
    before = measure(model, tokenizer, [end, *first, end], CONTEXT).metrics["loss"].value * 5
    both = measure(model, tokenizer, [end, *first, end, *second], CONTEXT, separator=end).metrics["loss"].value * 9
    assert both == pytest.approx(alone + before, rel=1e-5)
    packed = measure(model, tokenizer, [end, *first, end, *second], CONTEXT).metrics["loss"].value * 9
    assert packed != pytest.approx(both, rel=1e-3)


@pytest.mark.parametrize("stride", [8, 16])
def test_pieces_give_what_the_whole_gives(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer("byte", ())
    model, ids = build(tokenizer), tokenizer.encode(TEXT).tolist()
    whole = measure(model, tokenizer, ids, stride)
    monkeypatch.setattr("gptmill.evals.text_loss.PIECE_TOKENS", 3 * CONTEXT)
    monkeypatch.setattr("gptmill.evals.text_loss.DECODED_TOKENS", 7)
    pieces = measure(model, tokenizer, ids, stride)
    assert pieces.num_bytes == whole.num_bytes
    for name, measured in whole.metrics.items():
        assert pieces.metrics[name].value == pytest.approx(measured.value, rel=1e-6)


def test_nothing_to_predict_is_said(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("byte", ())
    with pytest.raises(UserError, match="text has no tokens to predict"):
        measure(build(tokenizer), tokenizer, [1], CONTEXT)
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match="is not UTF-8 at byte 2"):
        read_text(tmp_path / "bad.txt", tokenizer)
    with pytest.raises(UserError, match="cannot read --text"):
        read_text(tmp_path, tokenizer)
