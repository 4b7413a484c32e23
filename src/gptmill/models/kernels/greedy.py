"""The end of a greedy decode step: the likeliest token of each text, and the move to the next position.

Shape suffixes: B texts, S steps, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor


def advance_greedily(
    logits_BV: Tensor, step_1: Tensor, tokens_B: Tensor, positions_B: Tensor, sampled_BS: Tensor
) -> None:
    """Writes each text's likeliest token in place of its last one and into column `step_1` of `sampled_BS`, and adds 1
    to its position. NaN counts as 0."""
    if logits_BV.device.type != "cuda":
        tokens_B.copy_(logits_BV.nan_to_num(nan=0.0).argmax(dim=-1))
        sampled_BS.index_copy_(1, step_1, tokens_B[:, None])
        positions_B.add_(1)
        return
    from gptmill.models.kernels.greedy_triton import run_greedy

    run_greedy(logits_BV, step_1, tokens_B, positions_B, sampled_BS)
