"""Key mapping of GPT-2, to the names of `transformers`' GPT2LMHeadModel.

Its projections (Conv1D) are stored as (in, out); ours are nn.Linear's (out, in).
"""

from __future__ import annotations

from gptmill.config.model import ModelConfig
from gptmill.models.huggingface.key_mapping import HfTensor, KeyMapping, KeyMappings

PREFIX = "transformer."
EMBEDDING = "transformer.wte.weight"
NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


def map_gpt2_keys(config: ModelConfig, vocab_size: int) -> KeyMappings:
    """The checkpoint's tensor for each of ours, in the order of our state dict."""
    width, hidden = config.embd_size, config.hidden_size
    projections = {
        "attention.qkv": ("attn.c_attn", 3 * width),
        "attention.proj": ("attn.c_proj", width),
        "mlp.up": ("mlp.c_fc", hidden),
        "mlp.proj": ("mlp.c_proj", width),
    }
    hf_tensors = {
        "token_embedding.weight": HfTensor(EMBEDDING, vocab_size),
        "position_embedding.weight": HfTensor("transformer.wpe.weight", config.context_length),
    }
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            for part, name in NORMS.items():
                hf_tensors[f"{ours}{part}.{kind}"] = HfTensor(f"{theirs}{name}.{kind}", width)
            for part, (name, rows) in projections.items():
                hf_tensors[f"{ours}{part}.{kind}"] = HfTensor(
                    f"{theirs}{name}.{kind}", rows, is_transposed=kind == "weight"
                )
    for kind in ("weight", "bias"):
        hf_tensors[f"final_norm.{kind}"] = HfTensor(f"transformer.ln_f.{kind}", width)
    return {name: KeyMapping((hf_tensor,)) for name, hf_tensor in hf_tensors.items()}
