"""Masks in their two forms: blocks let through what the table of true and false lets through."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compositions import COMPOSITIONS, TINY, build_wild, draw_tokens

from gptmill.models import masks, transformer
from gptmill.models.masks import can_use_flex_attention, make_cached_mask, make_mask

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WIDTH = 300  # more than two tiles, and no multiple of them
DOCUMENTS = torch.tensor([[0] * 130 + [130] * 170, [0] * 5 + [5] * 250 + [255] * 45])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention as it is, which a CPU can run too, forward and slowly."""

    def take(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    monkeypatch.setattr(masks, "_compile", take)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 128, 200])
def test_both_forms_let_the_same_through(window: int | None, are_apart: bool) -> None:
    tokens, documents = torch.zeros(2, WIDTH, dtype=torch.int64), DOCUMENTS if are_apart else None
    dense = make_mask(window, tokens, documents, use_flex=False)
    blocks = make_mask(window, tokens, documents, use_flex=True)
    if window is None and documents is None:
        assert dense == blocks == masks.Mask()
        return
    assert dense.dense_B1TS is not None
    assert blocks.block_mask is not None
    rows, places = torch.arange(2)[:, None, None], torch.arange(WIDTH)
    let_through = blocks.block_mask.mask_mod(rows, torch.zeros((), dtype=torch.int64), places[:, None], places)
    assert torch.equal(let_through.expand(2, -1, -1), dense.dense_B1TS[:, 0].expand(2, -1, -1))
    # A tile is left out where nothing in it is seen, and only there.
    tiles = torch.nn.functional.pad(let_through.expand(2, -1, -1).float(), (0, 84, 0, 84))
    seen = torch.nn.functional.max_pool2d(tiles, 128).bool()
    assert torch.equal(blocks.block_mask.to_dense()[:, 0].bool().expand(2, -1, -1), seen)


@pytest.mark.parametrize(("window", "seen"), [(None, [0, 1, 2, 3]), (1, [3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])])
def test_a_query_sees_itself_and_the_places_before_it_in_its_window(window: int | None, seen: list[int]) -> None:
    table = make_cached_mask(window, torch.tensor([3]), 6).dense_B1TS
    assert table is not None
    assert table.flatten().nonzero().flatten().tolist() == seen


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["classic", "everything"])
@pytest.mark.parametrize("are_apart", [False, True])
@torch.no_grad()
def test_a_model_sees_the_same_through_both_forms(name: str, are_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(COMPOSITIONS[name], context_length=WIDTH, attention_windows="150,full")
    model, tokens = build_wild(config, std=0.2), draw_tokens(2, WIDTH)
    documents = DOCUMENTS if are_apart else None
    expected = model.hidden_states(tokens, documents_BT=documents)
    monkeypatch.setattr(transformer, "can_use_flex_attention", lambda *_arguments, **_named: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile")
        torch.testing.assert_close(model.hidden_states(tokens, documents_BT=documents), expected, atol=1e-4, rtol=1e-4)


def test_blocks_are_for_gpus_wide_heads_and_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "HAS_TRITON", True)
    wide = replace(TINY, embd_size=64)
    assert can_use_flex_attention(wide, GPU, training=True)
    assert not can_use_flex_attention(wide, CPU, training=True)
    assert not can_use_flex_attention(TINY, GPU, training=True)
    assert not can_use_flex_attention(replace(wide, dropout=0.1), GPU, training=True)
    assert can_use_flex_attention(replace(wide, dropout=0.1), GPU, training=False)
    monkeypatch.setattr(masks, "HAS_TRITON", False)
    assert not can_use_flex_attention(wide, GPU, training=True)
