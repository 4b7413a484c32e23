"""Compressed models: saved and loaded bit for bit, plain again on demand, refused where they cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmill.config.compress_request import CompressRequest
from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig, Moe, RmsNorm, Rope, SwiGlu
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint
from gptmill.inference.compression import (
    VALUE,
    check_compressible,
    compress_model,
    dequantize,
    list_quantized,
    make_compression,
    pack_layers,
)
from gptmill.inference.loading import load_model
from gptmill.models.compressible import list_matrices
from gptmill.models.gpt import GPT, build_gpt, pad_vocab
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import save_checkpoint

CPU = torch.device("cpu")
CLASSIC = ModelConfig(num_layers=2, embd_size=64, num_heads=2, context_length=16)
LLAMA = replace(
    CLASSIC, positions=Rope(), norm=RmsNorm(), bias=False, feed_forward=SwiGlu(ffn_size=96), tied_head=False
)
MOE = replace(LLAMA, feed_forward=Moe(num_experts=3, ffn_size=32))
QUANTIZING = ("int8", "int8-dynamic", "int4")
PRUNING = ("prune", "prune-2:4")
TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def build(config: ModelConfig) -> GPT:
    model = build_gpt(config, pad_vocab(ByteTokenizer().vocab_size), seed=3).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases that are not zero
            parameter.data += 0.1
    return model


def compress(model: GPT, method: Any, **options: Any) -> GPT:
    compression = make_compression(CompressRequest(method=method, **options), "here")
    made = compress_model(check_compressible(model, compression, "the model"), compression).eval()
    pack_layers(made)
    return made


def save(folder: Path, model: GPT, record: Any) -> Path:
    tokenizer = ByteTokenizer()
    values: dict[str, Any] = {
        "config": list_values(replace(RunConfig(), model=model.config)),
        "tokenizer": tokenizer.spec(),
        "tokenizer_fingerprint": make_fingerprint(tokenizer),
        VALUE: record,
    }
    return save_checkpoint(folder, Checkpoint(3, {"model": dict(model.state_dict())}, values)).path


@pytest.mark.parametrize("config", [CLASSIC, LLAMA], ids=["classic", "llama"])
@pytest.mark.parametrize("method", [*QUANTIZING, *PRUNING])
def test_a_loaded_model_computes_what_was_saved_bit_for_bit(tmp_path: Path, method: Any, config: ModelConfig) -> None:
    plain = build(config)
    made = compress(plain, method)
    record = make_compression(CompressRequest(method=method), "here").make_value()
    loaded = load_model(save(tmp_path, made, record), CPU).model
    with torch.no_grad():
        for tokens in (TOKENS, TOKENS[:1, :4]):  # few rows take the kernels, many do not
            assert torch.equal(loaded.logits(tokens), made.logits(tokens))
            limit = {"int8": 0.02, "int8-dynamic": 0.02, "int4": 0.2}.get(method, 1.0)
            assert (made.logits(tokens) - plain.logits(tokens)).abs().max() < limit


@pytest.mark.parametrize("method", QUANTIZING)
def test_only_the_linear_layers_of_the_blocks_are_quantized(method: Any) -> None:
    model = build(LLAMA)
    made = compress(model, method)
    assert len(list_quantized(made)) == 4 * LLAMA.num_layers
    assert not list_matrices(made)
    assert list_matrices(model), "the original stays as it is"
    assert torch.equal(made.head_weight, model.head_weight)
    assert torch.equal(made.token_embedding.weight, model.token_embedding.weight)


@pytest.mark.parametrize("method", QUANTIZING)
def test_dequantized_weights_are_plain_and_compute_the_same(method: Any) -> None:
    made = compress(build(CLASSIC), method)
    plain = dequantize(made)
    assert plain.state_dict().keys() == build(CLASSIC).state_dict().keys()
    assert all(tensor.dtype == torch.float32 for tensor in plain.state_dict().values())
    with torch.no_grad():
        tolerance = 0.05 if method == "int8-dynamic" else 1e-5  # activations are rounded too
        torch.testing.assert_close(plain.logits(TOKENS), made.logits(TOKENS), rtol=0, atol=tolerance)


def test_experts_are_pruned_and_their_router_is_not() -> None:
    made = compress(build(MOE), "prune-2:4")
    weights = list_matrices(made)
    assert sum(name.endswith(("gate_up", "down_proj")) for name in weights) == 2 * MOE.num_layers
    assert all((weight == 0).float().mean() == 0.5 for weight in weights.values())
    assert all((block.mlp.router.weight != 0).all() for block in made.blocks)


@pytest.mark.parametrize("method", QUANTIZING)
def test_experts_are_not_quantized(method: Any) -> None:
    with pytest.raises(UserError, match="mixture of experts, which cannot be quantized; use --method prune"):
        compress(build(MOE), method)


def test_groups_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match=r"blocks.0.attention.qkv.weight has 64 inputs.*--group_size"):
        compress(build(CLASSIC), "int4", group_size=128)


DAMAGED: list[Any] = [
    {"method": "int9"},
    {"method": ["int8"]},
    {"method": "int4", "group_size": True},
    {"method": "int4", "group_size": 10**9},
    {"method": "int8", "group_size": 32},
    {"method": "int8", "sparsity": "much"},
    "int8",
]


@pytest.mark.parametrize("record", DAMAGED, ids=json.dumps)
def test_a_damaged_record_is_one_sentence(tmp_path: Path, record: Any) -> None:
    path = save(tmp_path, compress(build(CLASSIC), "int8"), record)
    with pytest.raises(UserError, match=r"unknown method|is damaged"):
        load_model(path, CPU)


def test_tensors_of_another_method_are_refused(tmp_path: Path) -> None:
    made = compress(build(CLASSIC), "int8")
    for method in ("int4", "prune"):
        record = make_compression(CompressRequest(method=method), "").make_value()  # type: ignore[arg-type]
        with pytest.raises(UserError, match="do not match its config"):
            load_model(save(tmp_path, made, record), CPU)
