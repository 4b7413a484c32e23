"""Writes a GGUF file that llama.cpp loads: metadata, tokenizer and tensors in F32, F16, BF16 or Q8_0."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import LinearScaling, Llama3Scaling, ModelConfig, Moe, Rope
from gptmill.inference.export.gguf_tensors import ARCHITECTURES, to_gguf_tensors
from gptmill.inference.export.gguf_tokenizer import make_gguf_tokenizer
from gptmill.inference.export.hf_folder import TORCH_DTYPES, cast, make_hf_weights
from gptmill.inference.export.passes import Report, count_passes
from gptmill.inference.export.source import ExportSource
from gptmill.models.huggingface.layouts import choose_layout

if TYPE_CHECKING:
    from gguf import GGUFWriter

Q8_0_BLOCK = 32
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
# Matrices that llama.cpp wants in F32.
PRECISE = ("position_embd.weight", "ffn_gate_inp.weight")


def check_gguf_model(config: ModelConfig) -> None:
    """Raises UserError for a model with a Hugging Face layout that llama.cpp does not compute as gptmill does."""
    if any(config.list_windows()):
        raise UserError(
            f"llama.cpp ignores the sliding windows of {choose_layout(config)}, and this model has attention_windows = "
            f"{config.attention_windows}; export with --to hf, or train with --attention_windows none"
        )
    scaling = config.positions.rope_scaling if isinstance(config.positions, Rope) else None
    if isinstance(scaling, Llama3Scaling) and choose_layout(config) != "llama":
        raise UserError(
            "llama.cpp has rope_scaling = llama3 for Llama only, and this model has QK-norm; use --to hf, or train "
            "with --no_qk_norm or --rope_scaling linear"
        )


def write_gguf(path: Path, source: ExportSource, dtype: str, license_name: str | None, report: Report) -> None:
    """Writes the file; the model must have a layout that `check_gguf_model` accepts."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    layout = choose_layout(source.config)
    assert layout is not None
    tokenizer = make_gguf_tokenizer(source.tokenizer)
    writer = GGUFWriter(path, ARCHITECTURES[layout])
    writer.add_name(source.name)
    if license_name is not None:
        writer.add_license(license_name)
    writer.add_file_type(LlamaFileType[FILE_TYPES[dtype]])
    _add_sizes(writer, source.config, source.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre_tokenizer)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    writer.add_bos_token_id(source.tokenizer.end_of_text)
    writer.add_eos_token_id(source.tokenizer.end_of_text)
    writer.add_add_bos_token(True)  # as gptmill samples: documents begin with this token
    encoded, advance = [], count_passes(report, source.parameters, 2)
    for name, tensor in make_gguf_tensors(source).items():
        kind = choose_type(name, tensor, dtype)
        encoded.append((encode(tensor, kind, name), tensor.numel()))
        writer.add_tensor(name, encoded[-1][0], raw_dtype=GGMLQuantizationType[kind])
        advance(tensor.numel())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array, parameters in encoded:
            writer.write_tensor_data(array)
            advance(parameters)
    finally:
        writer.close()


def make_gguf_tensors(source: ExportSource) -> dict[str, Tensor]:
    layout = choose_layout(source.config)
    assert layout is not None
    return to_gguf_tensors(make_hf_weights(source), layout, source.config)


def choose_type(name: str, tensor: Tensor, dtype: str) -> str:
    """The type of a tensor: norms, biases and a few matrices in F32; rows that no Q8_0 block fits in F16."""
    if tensor.ndim < 2 or name.endswith(PRECISE):
        return "F32"
    if dtype == "q8_0" and tensor.shape[-1] % Q8_0_BLOCK:
        return "F16"
    return TYPES[dtype]


def encode(tensor: Tensor, kind: str, name: str) -> NDArray[Any]:
    """The bytes of a tensor in a type of GGUF; raises UserError where F16 overflows."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if kind == "F16":
        cast(tensor, TORCH_DTYPES["float16"], name)
    array: NDArray[Any] = quantize(tensor.float().contiguous().numpy(), GGMLQuantizationType[kind])
    return array


def decode(data: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """The values of a tensor read back, in fp32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: NDArray[np.float32] = dequantize(np.array(data), GGMLQuantizationType[kind])
    return values


def _add_sizes(writer: GGUFWriter, config: ModelConfig, vocab_size: int) -> None:
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.embd_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    if not isinstance(config.positions, Rope):
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.positions.rope_base)
    if isinstance(config.positions.rope_scaling, LinearScaling):
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.positions.rope_scaling.rope_factor)
    if isinstance(config.feed_forward, Moe):
        writer.add_expert_count(config.feed_forward.num_experts)
        writer.add_expert_used_count(config.feed_forward.experts_per_token)
        writer.add_expert_feed_forward_length(config.hidden_size)
