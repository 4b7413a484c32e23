"""Small models of every composition, whose every parameter matters; for the tests beside."""

from __future__ import annotations

from dataclasses import replace

import torch

from gptmill.config.model import (
    Gelu,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    Moe,
    NoPositions,
    Relu2,
    RmsNorm,
    Rope,
    SwiGlu,
)
from gptmill.config.run import KernelChoice
from gptmill.models.fused.dispatch import MODELS
from gptmill.models.gpt import GPT, build_gpt

VOCAB = 50
CONTEXT = 12
TINY = ModelConfig(num_layers=2, embd_size=16, num_heads=4, context_length=CONTEXT)
ROPE = Rope(rope_base=50.0)  # a base that turns even the slowest pair within so short a context

COMPOSITIONS = {
    "classic": TINY,
    "one head": replace(TINY, num_heads=1),
    "no biases": replace(TINY, bias=False, norm=LayerNorm(norm_bias=False)),
    "rmsnorm": replace(TINY, norm=RmsNorm(), norm_eps=1e-6),
    "rope": replace(TINY, positions=ROPE),
    "rope, linear": replace(TINY, positions=replace(ROPE, rope_scaling=LinearScaling(rope_factor=3.0))),
    "rope, llama3": replace(
        TINY, positions=replace(ROPE, rope_scaling=Llama3Scaling(rope_factor=4.0, rope_original_context=40))
    ),
    "no positions": replace(TINY, positions=NoPositions()),
    "grouped queries": replace(TINY, num_kv_heads=2),
    "one key head, other width": replace(TINY, num_kv_heads=1, head_size=6),
    "qk norm": replace(TINY, qk_norm=True),
    "windows": replace(TINY, attention_windows="3"),
    "windows, full": replace(TINY, num_layers=3, attention_windows="3,full", positions=ROPE),
    "relu2": replace(TINY, feed_forward=Relu2(ffn_size=20)),
    "gelu of its own size": replace(TINY, feed_forward=Gelu(ffn_size=24)),
    "swiglu": replace(TINY, feed_forward=SwiGlu(ffn_size=24)),
    "moe": replace(TINY, feed_forward=Moe(num_experts=4, experts_per_token=2, ffn_size=8)),
    "untied": replace(TINY, tied_head=False),
    "soft-cap": replace(TINY, logit_softcap=2.0),
    "value embeddings": replace(TINY, num_layers=3, value_embeddings=1),
    "extra heads": replace(TINY, mtp_heads=2),
    "llama": replace(
        TINY, positions=ROPE, norm=RmsNorm(), bias=False, num_kv_heads=2, feed_forward=SwiGlu(), tied_head=False
    ),
    "everything": ModelConfig(
        num_layers=4,
        embd_size=16,
        num_heads=4,
        context_length=CONTEXT,
        norm=RmsNorm(),
        bias=False,
        positions=ROPE,
        num_kv_heads=2,
        head_size=6,
        qk_norm=True,
        attention_windows="4,2,full",
        feed_forward=Moe(num_experts=3, experts_per_token=2, ffn_size=8),
        tied_head=False,
        logit_softcap=3.0,
        value_embeddings=2,
        mtp_heads=1,
    ),
}


def build_wild(config: ModelConfig = TINY, seed: int = 0, std: float = 0.4, kernels: KernelChoice = "none") -> GPT:
    """Weights far larger than fresh ones, biases and norms at random too; the same with any kernels."""
    model = build_gpt(config, VOCAB, seed, model_class=MODELS[kernels]).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, std, generator=generator)
    return model


def draw_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))
