"""Triton kernel of attention in a decode step: one new token per sequence against its KV cache.

A program takes the new token's query, key and value from the packed projection, applies QK-norm and RoPE, appends key
and value to the cache, and attends with all query heads of one key/value head to the positions before, block by block,
with an online softmax (Milakov and Gimelshein 2018). Scores and sums are products of small matrices, with the heads
padded to the tile of a tensor core. Separate operations would be ten kernels, each waiting for the one before.

A long sequence is split among several programs, as in flash-decoding (Dao et al. 2023): each leaves its maximum, its
total and its sums in memory, and the last to finish combines them. An atomic counter tells which one that is. How many
programs have work is read from the sequence's position: one CUDA graph serves every length.

Shape suffixes: B sequences, H query heads, K key/value heads, S positions, D head dimension, E = (H + 2 K) x D,
P programs of a sequence and head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gptmill.models.kernels.decode_attention import QkNorm
from gptmill.models.kernels.programmatic_launch import allow_next, make_launch_options, wait_for_previous
from gptmill.models.rotary import CosSin

BLOCK_BYTES = 16 << 10  # of keys at once
TILE_ROWS = 16  # the fewest rows of a tensor core's tile


@triton.jit
def _find_share(position, window, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The cached positions of a program, in whole blocks, and how many programs have any; the first has the new one."""
    first = tl.maximum(position - window + 1, 0) // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(position - first, BLOCK), SPLITS) * BLOCK
    begin = first + split * share
    active = tl.maximum(tl.cdiv(position - first, tl.maximum(share, 1)), 1)
    return begin, tl.minimum(begin + share, position), active


@triton.jit
def _load_rope(cos_ptr, sin_ptr, position, columns, HAS_ROPE: tl.constexpr, WIDTH: tl.constexpr):
    """The cosines and sines of a position; without RoPE anything, which nobody reads."""
    cos = columns.to(tl.float32)
    sin = columns.to(tl.float32)
    if HAS_ROPE:
        cos = tl.load(cos_ptr + position * WIDTH + columns)
        sin = tl.load(sin_ptr + position * WIDTH + columns)
    return cos, sin


@triton.jit
def _prepare(
    x_ptr, norm_ptr, cos, sin, eps, columns, partners,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Heads' queries or keys with QK-norm and RoPE applied; `partners` are the columns that RoPE pairs with."""
    x = tl.load(x_ptr + columns[None, :]).to(tl.float32)
    y = x
    if HAS_ROPE:
        y = tl.load(x_ptr + partners[None, :]).to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
        x = x * rstd * tl.load(norm_ptr + columns).to(tl.float32)[None, :]
        if HAS_ROPE:
            y = y * rstd * tl.load(norm_ptr + partners).to(tl.float32)[None, :]
    if HAS_ROPE:
        x = x * cos[None, :] + tl.where(columns < WIDTH // 2, -1.0, 1.0)[None, :] * y * sin[None, :]
    return x


@triton.jit
def _append_token(
    qkv_ptr, keys_ptr, values_ptr, key_norm_ptr, position, head, cos, sin, eps, columns, partners,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
):  # fmt: skip
    """Appends the new token's key and value to the cache, and returns them as they are stored there."""
    key_ptr = qkv_ptr + (HEADS + head + tl.zeros((1, 1), tl.int32)) * WIDTH
    key = _prepare(key_ptr, key_norm_ptr, cos, sin, eps, columns, partners, HAS_NORM, HAS_ROPE, WIDTH)
    key = key.to(keys_ptr.dtype.element_ty)
    value = tl.load(qkv_ptr + (HEADS + KV_HEADS + head) * WIDTH + columns).to(values_ptr.dtype.element_ty)
    tl.store(keys_ptr + position * WIDTH + columns[None, :], key)
    tl.store(values_ptr + position * WIDTH + columns, value)
    return key, value


@triton.jit
def _attend_block(
    query, keys_ptr, values_ptr, block, position, window, columns, highest, total, sums,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a block of positions to the softmax so far: the highest score, the total of the weights, and the weighted
    sums of the values.

    Weights are exp(score - highest), so that none overflows. Where the block raises the highest score, what was added
    before shrinks by exp(old - new), as if it had been computed with the new one. The lowest that it may be is finite:
    a block without any visible position would else subtract infinities.
    """
    places = block + tl.arange(0, BLOCK)
    is_seen = (places > position - window) & (places < position)
    offsets = places[:, None] * WIDTH + columns[None, :]
    keys = tl.load(keys_ptr + offsets, mask=is_seen[:, None], other=0.0)
    values = tl.load(values_ptr + offsets, mask=is_seen[:, None], other=0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    scores = tl.where(is_seen[None, :], scores, -float("inf"))
    new_highest = tl.maximum(tl.maximum(highest, tl.max(scores, axis=1)), -1e30)
    shrink = tl.exp(highest - new_highest)
    weights = tl.exp(scores - new_highest[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
    return new_highest, total, sums


@triton.jit
def _store_part(
    partial_ptr, heads, split, columns, is_member, highest, total, sums,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Leaves this program's share of the softmax in memory, for the program that will combine them."""
    mine = partial_ptr + (heads * SPLITS + split) * (WIDTH + 2)
    tl.store(mine[:, None] + columns[None, :], sums, mask=is_member[:, None])
    tl.store(mine + WIDTH, highest, mask=is_member)
    tl.store(mine + WIDTH + 1, total, mask=is_member)


@triton.jit
def _combine_parts(
    partial_ptr, result_ptr, first_head, active, columns,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Combines what all programs of a sequence and key/value head have left, head by head.

    Each part is relative to its own highest score; the factor exp(its highest - the highest of all) makes them add up.
    """
    splits = tl.arange(0, SPLITS)
    is_active = splits < active
    for member in tl.static_range(GROUP):
        query_head = first_head + member
        theirs = partial_ptr + (query_head * SPLITS + splits) * (WIDTH + 2)
        maxima = tl.load(theirs + WIDTH, mask=is_active, other=-float("inf"))
        factors = tl.exp(maxima - tl.max(maxima, axis=0))
        whole = tl.sum(tl.load(theirs + WIDTH + 1, mask=is_active, other=0.0) * factors, axis=0)
        parts = tl.load(theirs[:, None] + columns[None, :], mask=is_active[:, None], other=0.0)
        result = tl.sum(parts * factors[:, None], axis=0) / whole
        tl.store(result_ptr + query_head * WIDTH + columns, result.to(result_ptr.dtype.element_ty))


@triton.jit
def decode_attention_kernel(
    qkv_ptr, keys_ptr, values_ptr, positions_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, result_ptr,
    partial_ptr, counter_ptr, row_stride, window, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous(EARLY)
    group: tl.constexpr = HEADS // KV_HEADS
    position = tl.load(positions_ptr + row)
    begin, end, active = _find_share(position, window, split, SPLITS, BLOCK)
    if split < active:
        columns = tl.arange(0, WIDTH)
        partners = (columns + WIDTH // 2) % WIDTH
        cos, sin = _load_rope(cos_ptr, sin_ptr, position, columns, HAS_ROPE, WIDTH)
        qkv_ptr += row * ((HEADS + 2 * KV_HEADS) * WIDTH)
        start = row.to(tl.int64) * KV_HEADS * row_stride + head * row_stride
        keys_ptr, values_ptr = keys_ptr + start, values_ptr + start
        members = tl.arange(0, ROWS)
        is_member = members < group
        query_ptr = qkv_ptr + (head * group + tl.where(is_member, members, 0))[:, None] * WIDTH
        query = _prepare(query_ptr, query_norm_ptr, cos, sin, eps, columns, partners, HAS_NORM, HAS_ROPE, WIDTH)
        query = (query * scale).to(keys_ptr.dtype.element_ty)
        highest = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        if split == 0:  # the new token itself: in registers, since the cache may not show it to all threads yet
            key, value = _append_token(
                qkv_ptr, keys_ptr, values_ptr, key_norm_ptr, position, head, cos, sin, eps, columns, partners,
                HEADS, KV_HEADS, WIDTH, HAS_NORM, HAS_ROPE,
            )  # fmt: skip
            highest = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)
            total += 1.0
            sums += value.to(tl.float32)[None, :]
        for block in tl.range(begin, end, BLOCK):
            highest, total, sums = _attend_block(
                query, keys_ptr, values_ptr, block, position, window, columns, highest, total, sums, WIDTH, BLOCK
            )
        allow_next(EARLY)
        first_head = row * HEADS + head * group
        heads = first_head + members
        if active == 1:
            place = result_ptr + heads[:, None] * WIDTH + columns[None, :]
            tl.store(place, (sums / total[:, None]).to(result_ptr.dtype.element_ty), mask=is_member[:, None])
        else:
            _store_part(partial_ptr, heads, split, columns, is_member, highest, total, sums, SPLITS, WIDTH)
            tl.debug_barrier()  # all of this program's stores come before its count
            counter_ptr += row * KV_HEADS + head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == active - 1:
                tl.store(counter_ptr, 0)  # for the next step
                _combine_parts(partial_ptr, result_ptr, first_head, active, columns, group, SPLITS, WIDTH)


def run_decode_attention(
    qkv_BE: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    positions_B: Tensor,
    result_BHD: Tensor,
    window: int | None,
    rope_SD: CosSin | None,
    qk_norm: QkNorm | None,
    partial: Tensor,
    counters: Tensor,
    splits: int,
) -> None:
    rows, kv_heads, capacity, width = keys_BKSD.shape
    heads = result_BHD.shape[1]
    cos, sin = rope_SD if rope_SD is not None else (result_BHD, result_BHD)
    query_norm, key_norm, eps = qk_norm if qk_norm is not None else (result_BHD, result_BHD, 0.0)
    block = max(TILE_ROWS, min(128, BLOCK_BYTES // (width * keys_BKSD.element_size())))
    decode_attention_kernel[(rows, kv_heads, splits)](
        qkv_BE, keys_BKSD, values_BKSD, positions_B, cos, sin, query_norm, key_norm, result_BHD, partial, counters,
        keys_BKSD.stride(1), window or capacity + 1, eps, width**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, ROWS=max(TILE_ROWS, triton.next_power_of_2(heads // kv_heads)),
        HAS_NORM=qk_norm is not None, HAS_ROPE=rope_SD is not None, SPLITS=splits, BLOCK=block,
        num_warps=4,
        **make_launch_options(),
    )  # fmt: skip
