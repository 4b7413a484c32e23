"""GPT-2's published weight layout, as `transformers`' GPT2LMHeadModel names it, to ours and back.

The published layout stores its projections as (in, out); ours are nn.Linear's (out, in).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

OUTER_NAMES = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
}
BLOCK_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
EMBEDDING = "token_embedding.weight"


def to_gpt2_weights(weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Our state dict in the published layout, without the rows that pad the vocabulary."""
    published = {_rename(name): _turn(name, tensor) for name, tensor in weights.items()}
    published["transformer.wte.weight"] = weights[EMBEDDING][:vocab_size]
    published["lm_head.weight"] = published["transformer.wte.weight"]
    return published


def from_gpt2_weights(published: Mapping[str, Tensor], padded_vocab_size: int) -> dict[str, Tensor]:
    """The published layout, with or without its `transformer.` prefix, as our state dict.

    Rows that pad the vocabulary get the mean embedding, hence the mean logit. GPT-2's logits are far below
    zero, so rows of zeros would take nearly all of the probability.
    """
    prefix = "" if any(name.startswith("transformer.") for name in published) else "transformer."
    published = {prefix + name: tensor for name, tensor in published.items()}
    num_layers = 1 + max(int(name.split(".")[2]) for name in published if name.startswith("transformer.h."))
    names = list(OUTER_NAMES)
    for layer in range(num_layers):
        names += [f"blocks.{layer}.{part}.{kind}" for part in BLOCK_NAMES for kind in ("weight", "bias")]
    weights = {name: _turn(name, published[_rename(name)]) for name in names}
    embedding = weights[EMBEDDING]
    padding = embedding.mean(dim=0, keepdim=True).expand(padded_vocab_size - embedding.shape[0], -1)
    weights[EMBEDDING] = torch.cat([embedding, padding])
    return weights


def _rename(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"transformer.h.{layer}.{BLOCK_NAMES[part]}.{kind}"


def _turn(name: str, tensor: Tensor) -> Tensor:
    is_projection = tensor.dim() == 2 and not name.endswith("embedding.weight")
    return tensor.t().contiguous() if is_projection else tensor
