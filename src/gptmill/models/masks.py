"""Attention masks: causal, with an optional sliding window, and without attention across documents.

One rule in two forms. A dense mask is a boolean matrix, which every device can use. A BlockMask lists the tiles of
that matrix that are not empty, for FlexAttention on CUDA, which skips the others: there a sliding window saves work.

Shape suffixes: B batch, T positions of the queries, S positions of the keys, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gptmill.config.model import ModelConfig

if TYPE_CHECKING:  # imported where it is used: it brings torch's compiler along, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask

SMALLEST_FLEX_HEAD = 16  # FlexAttention's kernels take no narrower heads
HAS_TRITON = find_spec("triton") is not None


class Mask(NamedTuple):
    """A dense mask, a BlockMask, or neither: then attention is just causal, or sees all."""

    dense_B1TS: Tensor | None = None
    block_mask: BlockMask | None = None
    is_causal: bool = True
    """Without a mask: whether a query sees only keys up to its own position."""


class Branches(NamedTuple):
    """Rows in which several texts go on from one beginning: a branch sees the beginning and itself."""

    positions_BT: Tensor
    """Of each token, in the text that it belongs to."""
    numbers_BT: Tensor
    """Of each token's branch: 1 for the beginning, which all branches of its row share, and 0 for padding."""


def make_branch_mask(window: int | None, branches: Branches) -> Mask:
    """The mask of a whole row; a window is counted in positions of the texts."""
    positions_BT, numbers_BT = branches
    distances_BTS = positions_BT[:, :, None] - positions_BT[:, None, :]
    visible_BTS = (numbers_BT[:, None, :] == 1) | (numbers_BT[:, :, None] == numbers_BT[:, None, :])
    visible_BTS &= distances_BTS >= 0
    visible_BTS = visible_BTS if window is None else visible_BTS & (distances_BTS < window)
    return Mask(visible_BTS.unsqueeze(1))


def make_mask(
    window: int | None,
    tokens_BT: Tensor,
    documents_BT: Tensor | None,
    *,
    use_flex: bool,
    queries_T: Tensor | None = None,
) -> Mask:
    """The mask of a whole row, or of the queries at some positions of it over all keys.

    A query sees its own position and the `window` - 1 before it. `documents_BT` holds, for each token, the position
    at which its document begins; tokens of different documents do not see each other. If attention is just causal,
    that is all that the result says.
    """
    T = tokens_BT.shape[1]
    window = None if window is None or window >= T else window
    if window is None and documents_BT is None:
        return Mask()
    if use_flex:
        return Mask(block_mask=_make_block_mask(window, tokens_BT, documents_BT, queries_T))
    positions_S = torch.arange(T, device=tokens_BT.device)
    visible_TS = _is_visible((positions_S if queries_T is None else queries_T)[:, None], positions_S, window)
    if documents_BT is None:
        return Mask(visible_TS[None, None])
    asking_BT = documents_BT if queries_T is None else documents_BT[:, queries_T]
    return Mask((visible_TS & (asking_BT[:, :, None] == documents_BT[:, None, :])).unsqueeze(1))


def make_cached_mask(window: int | None, positions: Tensor, num_positions: int) -> Mask:
    """The mask of queries at `positions`, (T) or (B, T), over a KV cache of `num_positions`, some of them still empty.

    Single tokens may go on past the cache's end: they overwrite the oldest, as in a ring buffer.
    """
    positions_S = torch.arange(num_positions, device=positions.device)
    distances = (positions[..., None] - positions_S) % num_positions
    visible = distances <= positions[..., None]
    visible = visible if window is None else visible & (distances < window)
    return Mask(visible.view(-1, 1, *visible.shape[-2:]))


def can_use_flex_attention(config: ModelConfig, device: torch.device, *, training: bool) -> bool:
    """Whether FlexAttention can compute what the config asks for; it has no dropout."""
    has_dropout = training and config.dropout > 0
    return device.type == "cuda" and HAS_TRITON and config.head_width >= SMALLEST_FLEX_HEAD and not has_dropout


def flex_attend(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, block_mask: BlockMask, *, is_grouped: bool) -> Tensor:
    """FlexAttention; `is_grouped` for grouped-query attention."""
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled, it would materialise the whole score matrix. Inside a compiled model it is compiled already.
    attend: Any = flex_attention
    if not torch.compiler.is_compiling():
        attend = _compile(flex_attention)
    return attend(q_BHTD, k_BHTD, v_BHTD, block_mask=block_mask, enable_gqa=is_grouped)  # type: ignore[no-any-return]


def _is_visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    visible = query >= key
    return visible if window is None else visible & (query - key < window)


def _make_block_mask(
    window: int | None, tokens_BT: Tensor, documents_BT: Tensor | None, queries_T: Tensor | None
) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    B, S = tokens_BT.shape
    T = S if queries_T is None else len(queries_T)

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        query = query if queries_T is None else queries_T[query]
        visible = _is_visible(query, key, window)
        return visible if documents_BT is None else visible & (documents_BT[b, query] == documents_BT[b, key])

    rows = None if documents_BT is None else B  # a window alone is the same in every row
    make = _compile(create_block_mask)  # uncompiled, it would materialise the whole matrix
    return make(is_visible, rows, None, T, S, device=tokens_BT.device)  # type: ignore[no-any-return]


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
