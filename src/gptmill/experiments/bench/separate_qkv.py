"""Attention with one projection each for queries, keys and values, which the ablation compares the packed one with.

A plug-in that the measured runs load: the models themselves always pack the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gptmill.config.model import ModelConfig
from gptmill.config.plugins import Part, add_part, make_fingerprint
from gptmill.models.attention import ATTENTIONS, Attention
from gptmill.models.rotary import CosSin, apply_rope


@dataclass(frozen=True)
class SeparateQkv:
    """Softmax attention with three projections."""

    tag: ClassVar[str] = "separate_qkv"


class SeparateAttention(Attention):
    """Attention whose packed projection is divided into its three parts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        widths = self.packed_splits.pop("qkv.weight")
        del self.qkv
        self.query, self.key, self.value = (nn.Linear(config.embd_size, width, config.bias) for width in widths)

    def project_qkv(self, x_BTC: Tensor, rope: CosSin | None) -> tuple[Tensor, Tensor, Tensor]:
        projected = (projection(x_BTC) for projection in (self.query, self.key, self.value))
        q_BTHD, k_BTKD, v_BTKD = (part.unflatten(-1, (-1, self.head_width)) for part in projected)
        q_BTHD, k_BTKD = self.normalise_heads(q_BTHD, k_BTKD)
        if rope is not None:
            q_BTHD, k_BTKD = apply_rope(q_BTHD, rope), apply_rope(k_BTKD, rope)
        return q_BTHD, k_BTKD, v_BTKD


ATTENTIONS[SeparateQkv] = SeparateAttention
add_part(Part("attention", SeparateQkv.tag, SeparateQkv, SeparateAttention, make_fingerprint(SeparateAttention)))
