"""ONNX Runtime gives our logits for every composition: of a prompt, and step by step from the cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from conftest import PROJECT

from gptmill.inference.export import onnx_folder
from gptmill.inference.export.onnx_folder import open_onnx, run_onnx, write_model
from gptmill.inference.export.onnx_model import OnnxModel

sys.path.append(str(PROJECT / "tests" / "models"))
from compositions import COMPOSITIONS, CONTEXT, VOCAB, build_wild, draw_tokens

TOKENS = VOCAB - 3  # the rest only pads the embedding


def run(name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """ONNX Runtime's logits of three rows that come in parts, and ours of the whole."""
    config = COMPOSITIONS[name]
    model = build_wild(config)
    write_model(folder, OnnxModel(config, model.state_dict(), TOKENS).build(), config, TOKENS)
    tokens = draw_tokens(3, CONTEXT) % TOKENS
    found = run_onnx(open_onnx(folder), tokens, [5, 1, 1, CONTEXT - 7], config)
    with torch.no_grad():
        return found, model.logits(tokens)[..., :TOKENS]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_logits_are_ours_in_every_composition(name: str, tmp_path: Path) -> None:
    found, expected = run(name, tmp_path)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "model.onnx.data").exists()


def test_weights_of_a_large_model_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_folder, "MAX_INLINE_BYTES", 1000)
    found, expected = run("everything", tmp_path)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (tmp_path / "model.onnx.data").stat().st_size > 50_000
