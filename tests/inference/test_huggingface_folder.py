"""Folders that `transformers` wrote: whole or in shards, in any dtype; and those that gptmill refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig, RmsNorm, Rope, SwiGlu
from gptmill.inference.huggingface_folder import read_hf_folder
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.huggingface.config_export import make_hf_config

VOCAB = 100
GPT2 = ModelConfig(num_layers=2, embd_size=32, num_heads=4, context_length=24)
LLAMA = replace(GPT2, norm=RmsNorm(), bias=False, positions=Rope(), feed_forward=SwiGlu(ffn_size=40), tied_head=False)
MODELS = {"gpt2": GPT2, "llama": LLAMA, "qwen3": replace(LLAMA, num_kv_heads=2, head_size=12, qk_norm=True)}


def save(config: ModelConfig, folder: Path, **options: Any) -> Any:
    import transformers

    torch.manual_seed(1)
    content = make_hf_config(config, VOCAB)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content)).eval()
    model.save_pretrained(folder, **options)
    return model


@torch.no_grad()
@pytest.mark.parametrize("size", ["10GB", "20KB"], ids=["whole", "shards"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_its_logits_are_those_of_transformers(config: ModelConfig, size: str, tmp_path: Path) -> None:
    theirs = save(config, tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "20KB")
    read = read_hf_folder(tmp_path)
    assert (read.config, read.vocab_size) == (config, VOCAB)
    ours = GPT(config, pad_vocab(VOCAB), VOCAB).eval()
    ours.load_state_dict(read.convert(pad_vocab(VOCAB)))
    tokens = torch.arange(2 * config.context_length).view(2, -1)
    torch.testing.assert_close(ours.logits(tokens)[..., :VOCAB], theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT-2 in bf16."""
    save(GPT2, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_weights_become_fp32_with_the_rows_asked_for(folder: Path) -> None:
    """More rows than the file has, or fewer: published models pad their vocabulary further than gptmill does."""
    read = read_hf_folder(folder)
    for rows in (64, 128):
        weights = read.convert(rows)
        assert all(weight.dtype == torch.float32 and weight.is_contiguous() for weight in weights.values())
        assert len(weights["token_embedding.weight"]) == rows


def test_the_checksum_is_that_of_the_weights(folder: Path) -> None:
    before = read_hf_folder(folder).sha256
    assert read_hf_folder(folder).sha256 == before
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, folder / "model.safetensors")
    assert read_hf_folder(folder).sha256 != before


def test_links_are_followed_as_in_the_cache_of_downloads(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder / f"blob-{name}")
        (folder / name).symlink_to(f"blob-{name}")
    assert read_hf_folder(folder).vocab_size == VOCAB


def test_a_pickle_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no model\.safetensors; gptmill reads safetensors only"):
        read_hf_folder(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "absent.safetensors", "config.json"])
def test_an_index_names_safetensors_files_of_its_folder_only(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}), encoding="utf-8")
    with pytest.raises(UserError, match="no safetensors file in that folder"):
        read_hf_folder(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"vocab_size": 90}, "has not 90 rows"),
        ({"vocab_size": "many"}, "no valid vocab_size"),
        ({"activation_function": "relu"}, "activation_function = relu"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder: Path, content: dict[str, Any], said: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_hf_folder(folder)


def test_broken_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="is not valid JSON"):
        read_hf_folder(folder)
