"""A GGUF file as a published model: llama.cpp's metadata and tensor names turned into those of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.data.files import hash_file
from gptmill.inference.importing.gguf_file import GgufFile
from gptmill.inference.importing.gguf_tokenizer import build_gguf_tokenizer
from gptmill.inference.published_model import LazyTensors, PublishedModel
from gptmill.models.huggingface.config_import import read_hf_config
from gptmill.models.rotary import make_llama3_factors

MODEL_TYPES = {"gpt2": "gpt2", "llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Keys of the metadata, behind the architecture's name, and those of config.json.
GPT2_KEYS = {
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "attention.head_count": "n_head",
    "context_length": "n_positions",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "feed_forward_length": "n_inner",
}
LLAMA_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)")
ORIGINAL_CONTEXTS = tuple(2**power for power in range(5, 21))

Reader = Callable[[], Tensor]


def read_gguf(path: Path) -> PublishedModel:
    """Raises UserError for a file that is damaged, or whose model gptmill does not have."""
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise UserError(f"{path} is of architecture {architecture!r:.60}, and gptmill reads {known}; use one of those")
    if file.metadata.get("split.count", 1) != 1:
        raise UserError(f"{path} is one of several parts; join them with llama.cpp's llama-gguf-split --merge")
    if EMBEDDING not in file.tensors:
        raise UserError(f"{path} has no {EMBEDDING}; use a complete model")
    content = _make_config(file, architecture)
    try:
        config = _restore_scaling(read_hf_config(content), file)
    except UserError as error:
        raise UserError(f"{path}: {str(error).replace('config.json', 'its metadata')}") from None
    config = replace(config, tied_head=_has_tied_head(file))
    readers = dict(_list_readers(file, architecture, config))
    return PublishedModel(
        path,
        "GGUF",
        config,
        content["model_type"],
        file.tensors[EMBEDDING].shape[0],
        LazyTensors(readers),
        hash_file(path),
        build_tokenizer=lambda: build_gguf_tokenizer(file),
    )


def _make_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The config.json that the model would have in a Hugging Face folder."""
    metadata, kind = file.metadata, MODEL_TYPES[architecture]
    keys = GPT2_KEYS if kind == "gpt2" else LLAMA_KEYS
    content = {
        ours: metadata[f"{architecture}.{key}"] for key, ours in keys.items() if f"{architecture}.{key}" in metadata
    }
    content["model_type"] = "mistral" if kind == "llama" and content.get("sliding_window") else kind
    if kind == "gpt2":
        return content
    content |= {"norm_topk_prob": True, "use_sliding_window": bool(content.get("sliding_window"))}
    if kind == "llama":
        content |= dict.fromkeys(("attention_bias", "mlp_bias"), "blk.0.attn_q.bias" in file.tensors)
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        content["rope_scaling"] = {"rope_type": scaling, "factor": metadata.get(f"{architecture}.rope.scaling.factor")}
    size = metadata.get(f"{architecture}.rope.dimension_count")
    width = content.get("head_dim")
    if size is not None and width is not None and size != width:
        content["partial_rotary_factor"] = f"{size} of {width}"
    return content


def _restore_scaling(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """The config with Llama 3's RoPE scaling, of which the file holds only what it makes of the frequencies."""
    if ROPE_FACTORS not in file.tensors:
        return config
    factors_F = file.read(ROPE_FACTORS).flatten()
    for context in ORIGINAL_CONTEXTS:
        found = make_llama3_factors(config, float(factors_F.max()), context)
        if found is not None and found[1].shape == factors_F.shape and torch.allclose(found[1], factors_F, rtol=1e-3):
            return found[0]
    raise UserError("config.json has RoPE factors that are not Llama 3's, which gptmill does not support")


def _has_tied_head(file: GgufFile) -> bool:
    """Whether the head is left out, or stored again: llama.cpp has a copy in GPT-2's files."""
    if HEAD not in file.tensors:
        return True
    one, other = file.tensors[EMBEDDING], file.tensors[HEAD]
    return (one.shape, one.type_number) == (other.shape, other.type_number) and torch.equal(
        file.read(EMBEDDING), file.read(HEAD)
    )


def _list_readers(file: GgufFile, architecture: str, config: ModelConfig) -> Iterator[tuple[str, Reader]]:
    """The name that `transformers` has for each tensor, and what reads it."""
    names, blocks = (GPT2_NAMES, "transformer.h") if architecture == "gpt2" else (LLAMA_NAMES, "model.layers")
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name == HEAD:
            yield "lm_head.weight", partial(file.read, name)
            continue
        match = NAME.fullmatch(name)
        layer, part, kind = match.groups() if match else (None, "", "")
        prefix = f"{blocks}.{layer}." if layer is not None else ""
        if part in EXPERTS and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                yield f"{prefix}mlp.experts.{expert}.{EXPERTS[part]}.{kind}", partial(file.read, name, expert)
        elif part in names:
            yield f"{prefix}{names[part]}.{kind}", partial(_read, file, name, architecture, config)
        else:
            raise UserError(f"{file.path} has the tensor {name!r:.60}, which gptmill does not know; use another model")


def _read(file: GgufFile, name: str, architecture: str, config: ModelConfig) -> Tensor:
    """A tensor in the orientation and order that it has in `transformers`."""
    tensor = file.read(name)
    if architecture == "gpt2" and name.endswith(("qkv.weight", "attn_output.weight", "up.weight", "down.weight")):
        return tensor.t()
    if architecture == "llama" and (match := re.search(r"attn_([qk])\.", name)):
        return unpermute(tensor, config.num_heads if match[1] == "q" else config.kv_heads)
    return tensor


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """llama.cpp's Llama rotates neighbouring rows of a head; `transformers` and gptmill those half a head apart."""
    if len(rows) % (2 * num_heads):
        raise RuntimeError(f"{len(rows)} rows cannot be split among {num_heads} heads")
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
