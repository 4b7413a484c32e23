"""Key mapping of Llama and its relatives: Qwen3, which has QK-norm, and Qwen3's mixture of experts.

Their checkpoints have a tensor for each projection and each expert, where ours are packed and stacked.
"""

from __future__ import annotations

from gptmill.config.model import ModelConfig, Moe
from gptmill.models.huggingface.key_mapping import HfTensor, KeyMapping, KeyMappings

PREFIX = "model."
EMBEDDING = "model.embed_tokens.weight"


def map_llama_keys(config: ModelConfig, vocab_size: int) -> KeyMappings:
    """The checkpoint's tensors for each of ours."""
    mappings = {"token_embedding.weight": _map_whole(EMBEDDING, vocab_size)}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        block = _map_attention(config, theirs) | _map_feed_forward(config, theirs)
        mappings |= {ours + name: mapping for name, mapping in block.items()}
    mappings["final_norm.weight"] = _map_whole("model.norm.weight", config.embd_size)
    if not config.tied_head:
        mappings["head.weight"] = _map_whole("lm_head.weight", vocab_size)
    return mappings


def _map_attention(config: ModelConfig, block: str) -> dict[str, KeyMapping]:
    width, kv_rows = config.embd_size, config.kv_heads * config.head_width
    qkv = {"q_proj": config.num_heads * config.head_width, "k_proj": kv_rows, "v_proj": kv_rows}
    mappings = {"attention_norm.weight": _map_whole(f"{block}input_layernorm.weight", width)}
    for kind in ("weight", "bias") if config.bias else ("weight",):
        parts = (HfTensor(f"{block}self_attn.{name}.{kind}", rows) for name, rows in qkv.items())
        mappings[f"attention.qkv.{kind}"] = KeyMapping(tuple(parts))
        mappings[f"attention.proj.{kind}"] = _map_whole(f"{block}self_attn.o_proj.{kind}", width)
    if config.qk_norm:
        mappings["attention.query_norm.weight"] = _map_whole(f"{block}self_attn.q_norm.weight", config.head_width)
        mappings["attention.key_norm.weight"] = _map_whole(f"{block}self_attn.k_norm.weight", config.head_width)
    return mappings


def _map_feed_forward(config: ModelConfig, block: str) -> dict[str, KeyMapping]:
    width, hidden = config.embd_size, config.hidden_size
    mappings = {"mlp_norm.weight": _map_whole(f"{block}post_attention_layernorm.weight", width)}
    if isinstance(config.feed_forward, Moe):
        count = config.feed_forward.num_experts
        experts = [f"{block}mlp.experts.{expert}." for expert in range(count)]
        halves = (HfTensor(f"{expert}{name}.weight", hidden) for expert in experts for name in ("gate_proj", "up_proj"))
        mappings["mlp.router.weight"] = _map_whole(f"{block}mlp.gate.weight", count)
        mappings["mlp.gate_up"] = KeyMapping(tuple(halves), stacked=count)
        mappings["mlp.down_proj"] = KeyMapping(
            tuple(HfTensor(f"{expert}down_proj.weight", width) for expert in experts), count
        )
        return mappings
    for kind in ("weight", "bias") if config.bias else ("weight",):
        halves = (HfTensor(f"{block}mlp.{name}.{kind}", hidden) for name in ("gate_proj", "up_proj"))
        mappings[f"mlp.gate_up.{kind}"] = KeyMapping(tuple(halves))
        mappings[f"mlp.proj.{kind}"] = _map_whole(f"{block}mlp.down_proj.{kind}", width)
    return mappings


def _map_whole(name: str, rows: int) -> KeyMapping:
    """One tensor of ours that is one of the checkpoint's."""
    return KeyMapping((HfTensor(name, rows),))
