"""Key mapping of GPT-2, to the names of `transformers`' GPT2LMHeadModel.

Its projections (Conv1D) are stored as (in, out); ours are nn.Linear's (out, in). nanoGPT has the same names, but may
lack biases, and llama.cpp's files may have a head of their own; `transformers` has neither.
"""

from __future__ import annotations

from gptmill.config.model import LayerNorm, ModelConfig
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
    norm_kinds = ("weight", "bias") if config.norm == LayerNorm(norm_bias=True) else ("weight",)
    hf_tensors = {
        "token_embedding.weight": HfTensor(EMBEDDING, vocab_size),
        "position_embedding.weight": HfTensor("transformer.wpe.weight", config.context_length),
    }
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind in norm_kinds:
            for part, name in NORMS.items():
                hf_tensors[f"{ours}{part}.{kind}"] = HfTensor(f"{theirs}{name}.{kind}", width)
        for kind in ("weight", "bias") if config.bias else ("weight",):
            for part, (name, rows) in projections.items():
                hf_tensors[f"{ours}{part}.{kind}"] = HfTensor(
                    f"{theirs}{name}.{kind}", rows, is_transposed=kind == "weight"
                )
    for kind in norm_kinds:
        hf_tensors[f"final_norm.{kind}"] = HfTensor(f"transformer.ln_f.{kind}", width)
    if not config.tied_head:
        hf_tensors["head.weight"] = HfTensor("lm_head.weight", vocab_size)
    return {name: KeyMapping((hf_tensor,)) for name, hf_tensor in hf_tensors.items()}
