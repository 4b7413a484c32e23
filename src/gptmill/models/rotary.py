"""Rotary position embeddings (RoPE, Su et al. 2021): pairs of channels are rotated by an angle that grows with the
token's position, so that the product of a query and a key depends on their distance alone.

Channel i is paired with channel i + D/2, as in Llama and `transformers`. The cosines and sines are computed in each
forward pass; that costs one pass over T x D numbers.

Shape suffixes: B batch, T sequence, H heads, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gptmill.config.model import LinearScaling, Llama3Scaling, ModelConfig, NoScaling, Rope
from gptmill.models.casting import cast

LOW_FREQ_FACTOR = 1.0  # Llama 3.1's: a frequency with fewer rotations than this in the original context is low
HIGH_FREQ_FACTOR = 4.0  # and with more than this, high

CosSin = tuple[Tensor, Tensor]
"""The cosines and sines of every position's angles, cos_TD and sin_TD, in fp32; or a row of them for each text."""


def make_rope(positions: Tensor, config: ModelConfig) -> CosSin | None:
    """The cosines and sines for RoPE at these positions, (T) or (B, T); None for a model without RoPE."""
    if not isinstance(config.positions, Rope):
        return None
    frequencies_F = make_frequencies(config.positions, config.head_width, positions.device)
    angles_TF = positions[..., None].float() * frequencies_F
    angles_TD = torch.cat([angles_TF, angles_TF], dim=-1)
    return angles_TD.cos(), angles_TD.sin()


def apply_rope(x_BTHD: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotates queries or keys, in fp32; the result has the dtype of x."""
    cos_T1D, sin_T1D = (part.unsqueeze(-2) for part in cos_sin)
    x = x_BTHD.float()
    first, second = x.chunk(2, dim=-1)
    return cast(x * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D, x_BTHD.dtype)


def make_frequencies(rope: Rope, head_width: int, device: torch.device) -> Tensor:
    """Radians per position, from 1 down to almost 1 / rope_base, scaled as the config asks."""
    exponents_F = torch.arange(0, head_width, 2, device=device).float() / head_width
    frequencies_F = 1.0 / rope.rope_base**exponents_F
    if isinstance(rope.rope_scaling, LinearScaling):
        return frequencies_F / rope.rope_scaling.rope_factor
    if isinstance(rope.rope_scaling, Llama3Scaling):
        return _scale_like_llama3(frequencies_F, rope.rope_scaling)
    return frequencies_F


def _scale_like_llama3(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divides low frequencies by the factor, keeps high ones, and interpolates between the two."""
    rotations_F = scaling.rope_original_context * frequencies_F / (2 * math.pi)
    kept_F = ((rotations_F - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)).clamp(0.0, 1.0)
    return (1 - kept_F) * frequencies_F / scaling.rope_factor + kept_F * frequencies_F


def make_llama3_factors(config: ModelConfig, factor: float, original_context: int) -> tuple[ModelConfig, Tensor] | None:
    """The model with Llama 3's scaling, and what each frequency is divided by; None for a model without plain RoPE."""
    rope = config.positions
    if not isinstance(rope, Rope):
        return None
    scaled = replace(rope, rope_scaling=Llama3Scaling(factor, original_context))
    device = torch.device("cpu")
    plain_F = make_frequencies(replace(rope, rope_scaling=NoScaling()), config.head_width, device)
    return replace(config, positions=scaled), plain_F / make_frequencies(scaled, config.head_width, device)
