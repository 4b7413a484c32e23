"""The tensors of a GGUF file: names, shapes and row order as llama.cpp has them.

Experts are stacked, and GPT-2's projections are (out, in). The rows of Llama's queries and keys are reordered, since
llama.cpp rotates neighbouring channels there; Qwen3's are not. `from_gguf_tensors` is the inverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from gptmill.config.model import Llama3Scaling, ModelConfig, Moe, Rope
from gptmill.models.rotary import make_frequencies

ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""llama.cpp's name of each layout."""
ROPE_FACTORS = "rope_freqs.weight"
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(\w+)\.weight")
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
BLOCK_NAMES = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
BLOCK = re.compile(r"(?:transformer\.h|model\.layers)\.(\d+)\.(.+)")


def to_gguf_tensors(hf_weights: Mapping[str, Tensor], layout: str, config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face weights under the names, and in the form, of llama.cpp."""
    tensors = {}
    for name, tensor in _stack_experts(hf_weights).items():
        if layout == "gpt2" and name.endswith(TRANSPOSED):
            tensor = tensor.t()
        if (heads := _count_rotated_heads(name, layout, config)) is not None:
            tensor = interleave_halves(tensor, heads)
        tensors[make_gguf_name(name)] = tensor
    if isinstance(config.positions, Rope) and isinstance(config.positions.rope_scaling, Llama3Scaling):
        tensors[ROPE_FACTORS] = make_rope_factors(config.positions, config.head_width)
    return tensors


def from_gguf_tensors(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], layout: str, config: ModelConfig
) -> dict[str, Tensor]:
    """The inverse; `names` holds the Hugging Face name of each of the file's tensors."""
    hf_weights: dict[str, Tensor] = {}
    for gguf_name, name in names.items():
        tensor = tensors[gguf_name]
        if (heads := _count_rotated_heads(name, layout, config)) is not None:
            tensor = join_halves(tensor, heads)
        if layout == "gpt2" and name.endswith(TRANSPOSED):
            tensor = tensor.t()
        hf_weights |= _unstack_experts(name, tensor, config)
    return hf_weights


def make_gguf_name(name: str) -> str:
    """transformer.h.0.ln_1.bias is blk.0.attn_norm.bias."""
    stem, _, kind = name.rpartition(".")
    if (match := BLOCK.fullmatch(stem)) is not None:
        return f"blk.{match[1]}.{BLOCK_NAMES[match[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from halves (0, D/2, 1, D/2 + 1, …): a pair of RoPE becomes neighbours."""
    halves: Tensor = rows.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).reshape(rows.shape)


def join_halves(rows: Tensor, num_heads: int) -> Tensor:
    """The inverse of `interleave_halves`."""
    pairs: Tensor = rows.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(rows.shape)


def make_rope_factors(rope: Rope, head_width: int) -> Tensor:
    """What llama.cpp divides RoPE's frequencies by: Llama 3's scaling, written out."""
    cpu = torch.device("cpu")
    plain = make_frequencies(Rope(rope.rope_base), head_width, cpu)
    return plain / make_frequencies(rope, head_width, cpu)


def _count_rotated_heads(name: str, layout: str, config: ModelConfig) -> int | None:
    """The number of heads of a tensor whose rows are reordered; None for all others."""
    if layout != "llama" or not isinstance(config.positions, Rope):
        return None
    heads = {"q_proj": config.num_heads, "k_proj": config.kv_heads}
    return heads.get(name.split(".")[-2])


def _stack_experts(hf_weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The experts' matrices of a layer as one tensor, under the name without their numbers."""
    stacked: dict[str, list[Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in hf_weights.items():
        if (match := EXPERT.fullmatch(name)) is None:
            weights[name] = tensor
        else:
            stacked.setdefault(f"{match[1]}{match[3]}.weight", []).append(tensor)
    return weights | {name: torch.stack(tensors) for name, tensors in stacked.items()}


def _unstack_experts(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    if not isinstance(config.feed_forward, Moe) or ".experts." not in name:
        return {name: tensor}
    before, after = name.split(".experts.")
    return {f"{before}.experts.{number}.{after}": matrix for number, matrix in enumerate(tensor)}


def list_hf_names(hf_weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The Hugging Face name of each tensor of the file, with the experts' numbers left out."""
    return {make_gguf_name(name): name for name in _stack_experts(hf_weights)}
