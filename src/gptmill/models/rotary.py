"""Rotary positions: each pair of a head's numbers is turned by an angle that grows with the token's place.

Number i is paired with number i + D/2, as Llama and `transformers` do. Nothing is kept between forward passes: the
angles cost one pass over T x D numbers.

Shape suffixes: B batch, H heads, T time, D width of a head, F = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gptmill.config.model import LinearScaling, Llama3Scaling, ModelConfig, Rope

LOW_FREQ_FACTOR = 1.0  # Llama 3.1's: rotations that turn less than this often in the original context are slow
HIGH_FREQ_FACTOR = 4.0  # and more than this often, fast

Rotation = tuple[Tensor, Tensor]
"""The cosines and sines of every place's angles, cos_TD and sin_TD, in fp32."""


def make_rotation(positions_T: Tensor, config: ModelConfig) -> Rotation | None:
    """The rotation of each place; None where positions are not told by rotations."""
    if not isinstance(config.positions, Rope):
        return None
    frequencies_F = _make_frequencies(config.positions, config.head_width, positions_T.device)
    angles_TF = positions_T[:, None].float() * frequencies_F
    angles_TD = torch.cat([angles_TF, angles_TF], dim=-1)
    return angles_TD.cos(), angles_TD.sin()


def rotate(x_BTHD: Tensor, rotation: Rotation) -> Tensor:
    """Turns queries or keys; computed in fp32, returned as they came."""
    cos_T1D, sin_T1D = (part.unsqueeze(1) for part in rotation)
    x = x_BTHD.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D).to(x_BTHD.dtype)


def _make_frequencies(rope: Rope, head_width: int, device: torch.device) -> Tensor:
    """Radians per place, from 1 down to almost 1 / rope_base, slowed down as the scaling asks."""
    exponents_F = torch.arange(0, head_width, 2, device=device).float() / head_width
    frequencies_F = 1.0 / rope.rope_base**exponents_F
    if isinstance(rope.rope_scaling, LinearScaling):
        return frequencies_F / rope.rope_scaling.rope_factor
    if isinstance(rope.rope_scaling, Llama3Scaling):
        return _slow_down_slow_ones(frequencies_F, rope.rope_scaling)
    return frequencies_F


def _slow_down_slow_ones(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow rotations by the factor, fast ones not at all, those between in proportion to how often they turn."""
    turns_F = scaling.rope_original_context * frequencies_F / (2 * math.pi)
    share_F = ((turns_F - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)).clamp(0.0, 1.0)
    return (1 - share_F) * frequencies_F / scaling.rope_factor + share_F * frequencies_F
