"""Learning rates that transfer over width, so that a narrow model's best rates serve a wide one.

Muon's updates have the same size in every direction, and its best rate hardly depends on the width. AdamW's best rate
for matrices falls with the width, as in muP (Yang et al. 2022, arXiv:2203.03466). The sweeps in law.json agree.
"""

from __future__ import annotations

from typing import Any

BASE_WIDTH = 128
MATRIX_LR = 0.014
# Of Muon's other parameters: from the best of our sweep at small widths to that of books-124m-modern at 768.
EMBEDDING_LR, EMBEDDING_POWER = 0.012, 0.75
ADAMW_LR, MAX_ADAMW_LR = 2e-3, 4e-3  # at the base width
WARMUP_SHARE, MIN_WARMUP = 0.02, 10


def choose_rates(optimizer: str, width: int, steps: int) -> dict[str, Any]:
    """Peak learning rates and warm-up of a run."""
    warmup = {"warmup_steps": min(max(MIN_WARMUP, round(WARMUP_SHARE * steps)), max(1, steps // 4))}
    if optimizer == "muon":
        rate = EMBEDDING_LR * min(1.0, BASE_WIDTH / width) ** EMBEDDING_POWER
        return {"matrix_lr": MATRIX_LR, "max_lr": float(f"{rate:.2g}"), **warmup}
    return {"max_lr": min(MAX_ADAMW_LR, ADAMW_LR * BASE_WIDTH / width), **warmup}
