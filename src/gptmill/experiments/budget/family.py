"""The family of models that a budget chooses from: one architecture and optimizer in many sizes.

The scaling law is fitted on runs of this family, so it holds for no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FAMILY: dict[str, Any] = {
    "norm": "rmsnorm",
    "bias": False,
    "positions": "rope",
    "qk_norm": True,
    "feed_forward": "relu2",
    "zero_init": True,
    "optimizer": "muon",
    "schedule": "wsd",
    "min_lr": 0.0,
    "decay_fraction": 0.5,
}
NARROW_HEAD, WIDE_HEAD = 32, 64
WIDE = 256  # from this width on, heads are wide
BLOCK_MATRICES = 12  # weights of a block by its width squared: 4 in attention, 8 in the MLP


@dataclass(frozen=True)
class Shape:
    """Depth and width of a model."""

    num_layers: int
    embd_size: int

    @property
    def name(self) -> str:
        """For names of files and runs."""
        return f"{self.num_layers}x{self.embd_size}"

    @property
    def num_heads(self) -> int:
        return max(1, self.embd_size // (WIDE_HEAD if self.embd_size >= WIDE else NARROW_HEAD))

    @property
    def block_weights(self) -> int:
        """Weights of all blocks: the N of the scaling law, which leaves the embedding out."""
        return BLOCK_MATRICES * self.num_layers * self.embd_size**2

    def list_values(self) -> dict[str, Any]:
        return {"num_layers": self.num_layers, "embd_size": self.embd_size, "num_heads": self.num_heads}


# About 1.3 to 3.4 times as large from one to the next. Depth grows with width, as in GPT-2 and its successors. Three
# layers of width 64 are left out: on books they were worse than both 2 of 64 and 3 of 96.
SHAPES = (
    Shape(2, 64),
    Shape(3, 96),
    Shape(4, 96),
    Shape(4, 128),
    Shape(5, 160),
    Shape(6, 192),
    Shape(6, 256),
    Shape(8, 256),
    Shape(6, 384),
    Shape(8, 384),
    Shape(8, 512),
    Shape(12, 512),
    Shape(12, 768),
    Shape(16, 1024),
    Shape(24, 1024),
    Shape(24, 1536),
)
