"""Batches of sequences of similar length.

They depend on the lengths alone, never on the number of ranks: however many share them, each computes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Widths of batches in tokens, and the step between those above. Few, since torch.compile compiles every shape anew.
WIDTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768)
WIDE_STEP = 512
# Where shapes are free, widths are multiples of this: tensor cores want such.
NARROW_STEP = 8


@dataclass(frozen=True)
class LengthBatch:
    """Sequences by their number; the batch has `height` rows of `width` tokens."""

    members: NDArray[np.int64]
    width: int
    height: int


def plan_batches(
    lengths: NDArray[np.int64], max_width: int, batch_tokens: int, *, fixed_shapes: bool
) -> list[LengthBatch]:
    """Batches of about `batch_tokens` tokens. The longest sequences come first: if memory runs out, then at once.

    With `fixed_shapes`, few shapes occur: all batches of one width have the same height; the last one is padded.
    """
    order = np.argsort(-lengths, kind="stable")
    if fixed_shapes:
        return _plan_fixed(order, lengths, max_width, batch_tokens)
    batches, first = [], 0
    while first < len(order):
        width = min(-int(lengths[order[first]]) // NARROW_STEP * -NARROW_STEP, max_width)
        members = order[first : first + max(1, batch_tokens // width)]
        batches.append(LengthBatch(members, width, len(members)))
        first += len(members)
    return batches


def list_widths(max_width: int) -> list[int]:
    """The widths below `max_width`, and itself: a model has no more positions."""
    widths = [*WIDTHS, *range(2 * WIDE_STEP, max_width, WIDE_STEP)]
    return [*(width for width in widths if width < max_width), max_width]


def _plan_fixed(
    order: NDArray[np.int64], lengths: NDArray[np.int64], max_width: int, batch_tokens: int
) -> list[LengthBatch]:
    widths = list_widths(max_width)
    kinds = np.searchsorted(widths, lengths[order])
    batches = []
    for kind in reversed(range(len(widths))):
        members, rows = order[kinds == kind], max(1, batch_tokens // widths[kind])
        batches += [
            LengthBatch(members[first : first + rows], widths[kind], rows) for first in range(0, len(members), rows)
        ]
    return batches
