"""Samples during training: when they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gptmill.config.model import ModelConfig
from gptmill.config.run import EvaluationConfig
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.evals import samples
from gptmill.evals.samples import COMPILE_AFTER_TOKENS, Samples
from gptmill.models.gpt import build_gpt
from gptmill.runtime.world import World


@pytest.mark.parametrize("compiled", [True, False])
def test_samples_are_compiled_once_it_pays_and_only_in_a_run_that_is(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    asked = []

    def draw(*_: Any, compiled: bool, **__: Any) -> Iterator[int]:
        asked.append(compiled)
        return iter(b"abc")

    monkeypatch.setattr(samples, "generate", draw)
    config = EvaluationConfig(eval_freq=50, sample_tokens=COMPILE_AFTER_TOKENS // 4)
    found = Samples(config, ByteTokenizer(), 0, World(0, 1, torch.device("cpu")), compiled=compiled)
    model = build_gpt(ModelConfig(num_layers=1, embd_size=16, num_heads=2, context_length=8), 320, 0)
    for step in (0, 50, 199, 200, 1000):
        drawn = found.evaluate(model, step, lambda: False)
        assert drawn is not None
        assert drawn.text == "abc"
    assert asked == [False, False, False, compiled, compiled]
