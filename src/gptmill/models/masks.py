"""Who sees whom: nobody the future, a sliding window only what is near, and documents not each other.

The same rule in two forms. Dense: a table of true and false, which any device can use. Blocks: which tiles of that
table hold anything at all, for flex_attention on CUDA, which skips the others; there a sliding window saves work.

Shape suffixes: B batch, T time of the queries, S time of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gptmill.config.model import ModelConfig

if TYPE_CHECKING:  # where it is used it is imported: it brings torch's compiler along, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask

SMALLEST_FLEX_HEAD = 16  # flex_attention's kernels take no narrower heads
HAS_TRITON = find_spec("triton") is not None


class Mask(NamedTuple):
    """One of two forms, or neither: then all of the past is seen."""

    dense_B1TS: Tensor | None = None
    blocks: BlockMask | None = None


def make_mask(window: int | None, tokens_BT: Tensor, documents_BT: Tensor | None, *, in_blocks: bool) -> Mask:
    """For a whole row. A query sees itself and the `window` - 1 places before it; `documents_BT` says where in the
    row each token's document begins."""
    T = tokens_BT.shape[1]
    window = None if window is None or window >= T else window
    if window is None and documents_BT is None:
        return Mask()
    if in_blocks:
        return Mask(blocks=_make_blocks(window, tokens_BT, documents_BT))
    places_T = torch.arange(T, device=tokens_BT.device)
    seen_TT = _see(places_T[:, None], places_T, window)
    if documents_BT is None:
        return Mask(seen_TT[None, None])
    return Mask((seen_TT & (documents_BT[:, :, None] == documents_BT[:, None, :])).unsqueeze(1))


def make_cached_mask(window: int | None, positions_T: Tensor, num_places: int) -> Mask:
    """For queries at `positions_T` and keys at the places 0, 1, 2… of a cache, those that nobody filled yet too."""
    places_S = torch.arange(num_places, device=positions_T.device)
    return Mask(_see(positions_T[:, None], places_S, window)[None, None])


def can_use_flex_attention(config: ModelConfig, device: torch.device, *, training: bool) -> bool:
    """Whether flex_attention can compute what the config asks for; it knows no dropout."""
    has_dropout = training and config.dropout > 0
    return device.type == "cuda" and HAS_TRITON and config.head_width >= SMALLEST_FLEX_HEAD and not has_dropout


def flex_attend(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, blocks: BlockMask, *, shared: bool) -> Tensor:
    """Attention to what the blocks let through; `shared`: several query heads have one head of keys and values."""
    from torch.nn.attention.flex_attention import flex_attention

    # As it is only inside a model that is compiled: alone it would fill the whole table.
    attend: Any = flex_attention
    if not torch.compiler.is_compiling():
        attend = _compile(flex_attention)
    return attend(q_BHTD, k_BHTD, v_BHTD, block_mask=blocks, enable_gqa=shared)  # type: ignore[no-any-return]


def _see(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    seen = query >= key
    return seen if window is None else seen & (query - key < window)


def _make_blocks(window: int | None, tokens_BT: Tensor, documents_BT: Tensor | None) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    B, T = tokens_BT.shape

    def see(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        seen = _see(query, key, window)
        return seen if documents_BT is None else seen & (documents_BT[b, query] == documents_BT[b, key])

    rows = None if documents_BT is None else B  # windows alone are the same in every row
    make = _compile(create_block_mask)  # as it is, it would fill the whole table
    return make(see, rows, None, T, T, device=tokens_BT.device)  # type: ignore[no-any-return]


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
