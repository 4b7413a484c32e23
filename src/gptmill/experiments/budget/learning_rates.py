"""Learning rates that transfer over width, so that a narrow model's best rates serve a wide one.

Muon's updates have the same size in every direction, and its best rate hardly depends on the width. AdamW's best rate
for matrices falls with the width, as in muP (Yang et al. 2022, arXiv:2203.03466); embeddings keep theirs.
"""

from __future__ import annotations

from typing import Any

MATRIX_LR = 0.02
EMBEDDING_LR = 3e-3
ADAMW_LR, ADAMW_WIDTH = 4e-3, 128
"""AdamW's rate up to this width; beyond, it is that of 1 / width."""
WARMUP_SHARE, MIN_WARMUP = 0.02, 10


def choose_rates(optimizer: str, width: int, steps: int) -> dict[str, Any]:
    """Peak learning rates and warm-up of a run."""
    warmup = {"warmup_steps": min(max(MIN_WARMUP, round(WARMUP_SHARE * steps)), max(1, steps // 4))}
    if optimizer == "muon":
        return {"matrix_lr": MATRIX_LR, "max_lr": EMBEDDING_LR, **warmup}
    return {"max_lr": float(f"{ADAMW_LR * min(1.0, ADAMW_WIDTH / width):.2g}"), **warmup}
