"""Loading a checkpoint's model: every composition as it was saved, the averaged weights, and no memory for a lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig, Moe, NoPositions, RmsNorm, Rope, SwiGlu
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint
from gptmill.inference.loading import build_loaded, load_model, load_run_model
from gptmill.models.gpt import GPT, build_gpt, pad_vocab
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import load_checkpoint, save_checkpoint
from gptmill.runs.directory import RunDirectory

CPU = torch.device("cpu")
TINY = ModelConfig(num_layers=2, embd_size=8, num_heads=2, context_length=16)
MODERN = replace(
    TINY,
    positions=Rope(),
    norm=RmsNorm(),
    bias=False,
    num_kv_heads=1,
    qk_norm=True,
    attention_windows="4,full",
    tied_head=False,
    value_embeddings=1,
    mtp_heads=1,
)
CONFIGS = {
    "classic": TINY,
    "no positions, swiglu": replace(TINY, positions=NoPositions(), feed_forward=SwiGlu(ffn_size=12)),
    "modern": MODERN,
    "modern, moe": replace(MODERN, feed_forward=Moe(num_experts=3, ffn_size=4)),
}


def build(config: ModelConfig, seed: int) -> GPT:
    return build_gpt(config, pad_vocab(ByteTokenizer().vocab_size), seed).eval()


def save(folder: Path, config: ModelConfig, step: int = 3, **groups: dict[str, Tensor]) -> Path:
    tokenizer = ByteTokenizer()
    values: dict[str, Any] = {
        "config": list_values(replace(RunConfig(), model=config)),
        "tokenizer": tokenizer.spec(),
        "tokenizer_fingerprint": make_fingerprint(tokenizer),
    }
    return save_checkpoint(folder, Checkpoint(step, groups, values)).path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_model_of_any_composition_comes_back(config: ModelConfig, tmp_path: Path) -> None:
    model, tokens = build(config, seed=1), torch.arange(12)[None]
    loaded = load_model(save(tmp_path, config, model=model.state_dict()), CPU).model
    assert loaded.config == config
    assert torch.equal(loaded.logits(tokens), model.logits(tokens))


def test_the_averaged_weights_are_loaded_when_asked_for(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    raw, average = build(TINY, seed=1).state_dict(), build(TINY, seed=2).state_dict()
    save(run.checkpoints, TINY, model=raw, ema=average)
    for loaded, weights in (
        (load_run_model(run, "latest", CPU), raw),
        (load_run_model(run, "latest", CPU, weights="raw"), raw),
        (load_run_model(run, "3", CPU, weights="ema"), average),
    ):
        assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.model.state_dict().items())


@pytest.mark.parametrize("wanted", ["latest", "3"])
def test_a_run_without_averaged_weights_says_so(wanted: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    save(run.checkpoints, TINY, model=build(TINY, seed=1).state_dict())
    with pytest.raises(UserError, match="was trained without ema_decay"):
        load_run_model(run, wanted, CPU, weights="ema")


LIES = {
    "layers": replace(TINY, num_layers=10**9),
    "layers and value embeddings": replace(TINY, num_layers=10**9, value_embeddings=10**8),
    "extra heads": replace(TINY, context_length=10**12, mtp_heads=10**9, positions=Rope()),
    "context": replace(TINY, context_length=10**18),
    "width": replace(TINY, embd_size=2 * 10**17),
    "head width": replace(TINY, head_size=10**18),
    "experts": replace(TINY, feed_forward=Moe(num_experts=10**18)),
    "width of experts": replace(TINY, feed_forward=Moe(ffn_size=10**18)),
    "width inside": replace(TINY, feed_forward=SwiGlu(ffn_size=10**18)),
}


@pytest.mark.parametrize("config", LIES.values(), ids=LIES.keys())
def test_a_config_far_larger_than_the_file_is_refused_before_anything_is_built(
    config: ModelConfig, tmp_path: Path
) -> None:
    path = save(tmp_path, config, model=build(TINY, seed=1).state_dict())
    with pytest.raises(UserError) as error:
        load_model(path, CPU)
    assert str(path) in str(error.value)


@torch.no_grad()
def test_a_checkpoint_keeps_the_rule_of_its_softmax(tmp_path: Path) -> None:
    """One saved before the choice existed has the padding in it."""
    model, tokens = build(TINY, seed=1), torch.arange(16)[None]
    path = save(tmp_path, TINY, model=model.state_dict())
    new, old = (load_checkpoint(path, groups=("model",)) for _ in range(2))
    del old.values["config"]["padded_softmax"]
    for checkpoint, size in ((new, 257), (old, 320)):
        loaded = build_loaded(checkpoint, "it", CPU)
        expected = F.cross_entropy(model.logits(tokens)[0, :, :size], tokens[0], reduction="sum")
        torch.testing.assert_close(loaded.model(tokens, tokens).cross_entropy, expected)
