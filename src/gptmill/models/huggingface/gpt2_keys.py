"""GPT-2's published names, as `transformers`' GPT2LMHeadModel has them.

The published layout stores its projections as (in, out); ours are nn.Linear's (out, in).
"""

from __future__ import annotations

from gptmill.config.model import ModelConfig
from gptmill.models.huggingface.key_mapping import Piece, Pieces, Source

PREFIX = "transformer."
EMBEDDING = "transformer.wte.weight"
NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


def map_gpt2_keys(config: ModelConfig, vocab_size: int) -> Pieces:
    """Where each of our tensors comes from, in the order of our state dict."""
    width, hidden = config.embd_size, config.hidden_size
    projections = {
        "attention.qkv": ("attn.c_attn", 3 * width),
        "attention.proj": ("attn.c_proj", width),
        "mlp.up": ("mlp.c_fc", hidden),
        "mlp.proj": ("mlp.c_proj", width),
    }
    pieces = {
        "token_embedding.weight": Piece(EMBEDDING, vocab_size),
        "position_embedding.weight": Piece("transformer.wpe.weight", config.context_length),
    }
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            for part, name in NORMS.items():
                pieces[f"{ours}{part}.{kind}"] = Piece(f"{theirs}{name}.{kind}", width)
            for part, (name, rows) in projections.items():
                pieces[f"{ours}{part}.{kind}"] = Piece(f"{theirs}{name}.{kind}", rows, is_transposed=kind == "weight")
    for kind in ("weight", "bias"):
        pieces[f"final_norm.{kind}"] = Piece(f"transformer.ln_f.{kind}", width)
    return {name: Source((piece,)) for name, piece in pieces.items()}
