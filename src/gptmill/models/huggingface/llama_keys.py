"""The published names of Llama and of what follows it: Qwen3, which norms queries and keys, and its mixture of experts.

Published checkpoints have a tensor for each projection and each expert, where ours are fused and stacked.
"""

from __future__ import annotations

from gptmill.config.model import ModelConfig, Moe
from gptmill.models.huggingface.key_mapping import Piece, Pieces, Source

PREFIX = "model."
EMBEDDING = "model.embed_tokens.weight"


def map_llama_keys(config: ModelConfig, vocab_size: int) -> Pieces:
    """Where each of our tensors comes from."""
    pieces = {"token_embedding.weight": _list_rows(EMBEDDING, vocab_size)}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        block = _list_attention(config, theirs) | _list_feed_forward(config, theirs)
        pieces |= {ours + name: source for name, source in block.items()}
    pieces["final_norm.weight"] = _list_rows("model.norm.weight", config.embd_size)
    if not config.tied_head:
        pieces["head.weight"] = _list_rows("lm_head.weight", vocab_size)
    return pieces


def _list_attention(config: ModelConfig, block: str) -> dict[str, Source]:
    width, kv_rows = config.embd_size, config.kv_heads * config.head_width
    qkv = {"q_proj": config.num_heads * config.head_width, "k_proj": kv_rows, "v_proj": kv_rows}
    pieces = {"attention_norm.weight": _list_rows(f"{block}input_layernorm.weight", width)}
    for kind in ("weight", "bias") if config.bias else ("weight",):
        parts = (Piece(f"{block}self_attn.{name}.{kind}", rows) for name, rows in qkv.items())
        pieces[f"attention.qkv.{kind}"] = Source(tuple(parts))
        pieces[f"attention.proj.{kind}"] = _list_rows(f"{block}self_attn.o_proj.{kind}", width)
    if config.qk_norm:
        pieces["attention.query_norm.weight"] = _list_rows(f"{block}self_attn.q_norm.weight", config.head_width)
        pieces["attention.key_norm.weight"] = _list_rows(f"{block}self_attn.k_norm.weight", config.head_width)
    return pieces


def _list_feed_forward(config: ModelConfig, block: str) -> dict[str, Source]:
    width, hidden = config.embd_size, config.hidden_size
    pieces = {"mlp_norm.weight": _list_rows(f"{block}post_attention_layernorm.weight", width)}
    if isinstance(config.feed_forward, Moe):
        count = config.feed_forward.num_experts
        experts = [f"{block}mlp.experts.{expert}." for expert in range(count)]
        halves = (Piece(f"{expert}{name}.weight", hidden) for expert in experts for name in ("gate_proj", "up_proj"))
        pieces["mlp.router.weight"] = _list_rows(f"{block}mlp.gate.weight", count)
        pieces["mlp.gate_up"] = Source(tuple(halves), stacked=count)
        pieces["mlp.down_proj"] = Source(tuple(Piece(f"{expert}down_proj.weight", width) for expert in experts), count)
        return pieces
    for kind in ("weight", "bias") if config.bias else ("weight",):
        halves = (Piece(f"{block}mlp.{name}.{kind}", hidden) for name in ("gate_proj", "up_proj"))
        pieces[f"mlp.gate_up.{kind}"] = Source(tuple(halves))
        pieces[f"mlp.proj.{kind}"] = _list_rows(f"{block}mlp.down_proj.{kind}", width)
    return pieces


def _list_rows(name: str, rows: int) -> Source:
    return Source((Piece(name, rows),))
