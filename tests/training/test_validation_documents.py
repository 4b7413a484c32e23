"""Validation sees documents as training does."""

from __future__ import annotations

from pathlib import Path

from tiny import CPU, open_tiny

from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import open_shards
from gptmill.evals.loss import ValidationLoss


def test_whole_documents_are_validated_without_attention_across(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(120):
        (tmp_path / "texts" / f"{number}.txt").write_text("abcde " * (number % 5 + 1) + str(number), encoding="utf-8")
    request = PrepareRequest(out=str(tmp_path / "out"), tokenizer="byte", split="documents", val_fraction=0.4)
    shards = open_shards(prepare_corpus([str(tmp_path / "texts")], request, lambda _progress: None)[0])
    losses = {}
    for documents in ("packed", "masked", "whole"):
        tiny = open_tiny(shards, documents=documents)
        tiny.state.model.eval()
        losses[documents] = ValidationLoss(tiny.config, tiny.corpora, CPU).evaluate(tiny.state.model, 0).val_loss
    assert losses["whole"] == losses["masked"] != losses["packed"]
