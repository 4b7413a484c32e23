"""Model: logits, losses and text of a trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptmill.config.errors import ConfigError, UserError
from gptmill.inference.loading import load_run_model
from gptmill.inference.model import Model, build_model
from gptmill.runs.directory import RunDirectory

TEXT = "the quick brown fox jumps over a lazy dog while rain falls"


@pytest.fixture
def model(straight: Path) -> Model:
    return build_model(load_run_model(RunDirectory(straight), "latest", torch.device("cpu")))


def test_logits_have_the_shape_of_the_ids_and_no_padding(model: Model) -> None:
    row = model([1, 2, 3])
    assert row.shape == (3, model.tokenizer.vocab_size)
    batch = model([[1, 2, 3], [4, 5, 6]])
    assert batch.shape == (2, 3, model.tokenizer.vocab_size)
    torch.testing.assert_close(batch[0], row)
    assert torch.equal(model(torch.tensor([1, 2, 3], dtype=torch.uint8)), row)
    full = model.module.logits(torch.tensor([[1, 2, 3]]))[0]
    assert full.shape[-1] > row.shape[-1]
    assert torch.equal(full[:, : row.shape[-1]], row)
    assert not row.requires_grad


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "not empty"),
        ([[1], [2, 3]], "rows of one length"),
        ([1.5], "whole numbers"),
        ([True], "whole numbers"),
        ("text", "whole numbers"),
        ([[[1]]], "shape"),
        ([257], "id 257 is outside the vocabulary, which has ids 0 to 256"),
        ([-1], "id -1 is outside"),
        ([1] * 17, "17 ids are more than the model's context_length 16"),
    ],
)
def test_ids_that_no_model_can_take_are_refused(model: Model, ids: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model(ids)


def test_the_loss_of_a_short_text_is_its_mean_cross_entropy(model: Model) -> None:
    ids = model.encode_document(TEXT[:16])
    expected = F.cross_entropy(model(ids[:-1]), torch.tensor(ids[1:])).item()
    assert model.loss(TEXT[:16]) == pytest.approx(expected, rel=1e-5)


def test_every_token_of_a_long_text_counts_once_with_half_a_context_or_more(model: Model) -> None:
    ids, context = model.encode_document(TEXT), 16
    total = 0.0
    for target in range(1, len(ids)):
        end = target if target <= context else context + -(-(target - context) // 8) * 8
        window = ids[max(0, min(end, len(ids) - 1) - context) : target]
        logits = model(window)[-1]
        total += F.cross_entropy(logits, torch.tensor(ids[target])).item()
    assert model.loss(TEXT) == pytest.approx(total / (len(ids) - 1), rel=1e-4)
    with pytest.raises(UserError, match="empty text"):
        model.loss("")


def test_pieces_of_a_stream_are_the_generated_text(model: Model) -> None:
    options = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 50, "seed": 3}
    text = model.generate("the", **options)
    assert "".join(model.stream("the", **options)) == text
    assert model.generate("the", **options) == text
    assert model.generate("the", **{**options, "seed": 4}) != text
    assert model.decode(model.encode("é quick")) == "é quick"


def test_invalid_sampling_is_refused_at_the_call(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*max_new_tokens.*top_p"):
        model.stream("the", max_new_tokens=0, top_p=2.0)
    with pytest.raises(ConfigError, match="temperature = 'hot'"):
        model.stream("the", temperature="hot")
