"""Recomputation: less is kept, and nothing else changes."""

from __future__ import annotations

from typing import NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptmill.config.run import ActivationCheckpointing
from gptmill.models.activation_checkpointing import run_block

WIDTH, HEADS, ROWS, LENGTH = 32, 2, 2, 16
WAYS: tuple[ActivationCheckpointing, ...] = get_args(ActivationCheckpointing)


class Stats(NamedTuple):
    """What some blocks return beside their result."""

    mean: Tensor
    count: Tensor


class Context(NamedTuple):
    """What blocks are given beside their input."""

    scale: Tensor
    absent: Tensor | None


class SmallBlock(nn.Module):
    """Norms, attention, an MLP and dropout, as a transformer's block has them."""

    def __init__(self, has_stats: bool) -> None:
        super().__init__()
        self.has_stats = has_stats
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x_BTC: Tensor, context: Context) -> tuple[Tensor, Stats | None]:
        q, k, v = self.qkv(self.attention_norm(x_BTC)).view(ROWS, LENGTH, 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)
        x_BTC = x_BTC + self.dropout(self.proj(y)) * context.scale
        hidden = F.gelu(self.up(self.mlp_norm(x_BTC)), approximate="tanh")
        stats = Stats(hidden.square().mean(), (hidden.detach() > 0).sum()) if self.has_stats else None
        return x_BTC + self.dropout(self.down(hidden)), stats


class Stack(nn.Module):
    """Two blocks and a loss that needs all they return."""

    def __init__(self, how: ActivationCheckpointing, has_stats: bool = True) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(SmallBlock(has_stats) for _ in range(2))

    def forward(self, x_BTC: Tensor) -> Tensor:
        context, extra = Context(torch.full((), 1.5), None), torch.zeros(())
        for block in self.blocks:
            x_BTC, stats = run_block(block, self.how, x_BTC, context)
            extra = extra if stats is None else extra + stats.mean
        return x_BTC.square().sum() + extra


def build_stack(how: ActivationCheckpointing, has_stats: bool = True) -> Stack:
    torch.manual_seed(0)
    return Stack(how, has_stats)


def draw_input() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def train_once(stack: Stack, compiled: bool = False) -> list[Tensor]:
    """The loss and every gradient, with dropout drawn from a fixed seed, and the random number drawn next."""
    torch.manual_seed(7)
    forward = torch.compile(stack, backend="aot_eager") if compiled else stack
    loss = forward(draw_input())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in stack.parameters()), torch.rand(1)]


@pytest.mark.parametrize("has_stats", [True, False])
@pytest.mark.parametrize("how", [way for way in WAYS if way != "none"])
def test_loss_and_gradients_are_the_same_to_the_bit_with_dropout(how: ActivationCheckpointing, has_stats: bool) -> None:
    plain, recomputed = (train_once(build_stack(way, has_stats)) for way in ("none", how))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(recomputed, plain, strict=True))


class Births(TorchDispatchMode):
    """Remembers the memory of every result, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.sizes[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return result


def count_kept_bytes(how: ActivationCheckpointing) -> int:
    """Memory that the forward pass leaves occupied, and that was not there before."""
    stack, x_BTC = build_stack(how), draw_input()
    known = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*stack.parameters(), x_BTC)}
    with Births() as births:
        loss = stack(x_BTC)
    assert loss.requires_grad
    return sum(size for storage, size in births.sizes.items() if storage not in known and not storage.expired())


def test_selective_keeps_less_than_none_and_full_less_than_selective() -> None:
    none, selective, full = (count_kept_bytes(way) for way in ("none", "selective", "full"))
    stream = ROWS * LENGTH * WIDTH * 4
    assert full <= 4 * stream  # little more than what goes into each block and out of the last
    matmuls = 2 * (3 + 1 + 4 + 1) * stream
    assert matmuls <= selective < none - full


def test_without_training_or_without_gradients_nothing_is_wrapped() -> None:
    stack, x_BTC = build_stack("full"), draw_input()
    with torch.no_grad():
        assert not stack(x_BTC).requires_grad
    stack.eval()
    with Births() as births:
        loss = stack(x_BTC)
    kept = [storage for storage in births.sizes if not storage.expired()]
    assert loss.requires_grad
    assert len(kept) > len(list(stack.parameters()))


@pytest.mark.parametrize("how", WAYS)
def test_compiled_blocks_are_the_same(how: ActivationCheckpointing) -> None:
    plain, compiled = train_once(build_stack("none")), train_once(build_stack(how), compiled=True)
    torch.testing.assert_close(compiled[:-1], plain[:-1])
