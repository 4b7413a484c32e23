"""Hardware tiers: a size of model and of batches for each common size of GPU, as a place to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from gptmill.config.errors import UserError

HardwareName = Literal["auto", "8gb", "12gb", "24gb", "80gb"]

# Widths that a recipe gave for a model of another width.
DEFAULT_WIDTHS: dict[str, Any] = {"num_kv_heads": None, "head_size": None, "ffn_size": None}
TIERS: dict[str, dict[str, Any]] = {
    "8gb": {
        **DEFAULT_WIDTHS,
        "num_layers": 8,
        "embd_size": 512,
        "num_heads": 8,
        "context_length": 256,
        "mini_batch_size": 64,
        "total_batch_size": 64 * 256 * 8,
    },
    "12gb": {
        **DEFAULT_WIDTHS,
        "num_layers": 12,
        "embd_size": 768,
        "num_heads": 12,
        "context_length": 256,
        "mini_batch_size": 128,
        "total_batch_size": 128 * 256 * 4,
    },
    "24gb": {
        **DEFAULT_WIDTHS,
        "num_layers": 24,
        "embd_size": 1024,
        "num_heads": 16,
        "context_length": 512,
        "mini_batch_size": 256,
        "total_batch_size": 256 * 512 * 2,
    },
    "80gb": {
        **DEFAULT_WIDTHS,
        "num_layers": 24,
        "embd_size": 1024,
        "num_heads": 16,
        "context_length": 1024,
        "mini_batch_size": 64,
        "total_batch_size": 64 * 1024 * 8,
    },
}
GIB = 1 << 30
CARD_SHARE = 0.9  # of what a card is sold with, the least that it reports: some of it goes to error correction
USED_SHARE = 0.9  # of what a card reports, the most to plan for: CUDA, the allocator and the screen take some too


def choose_tier(memory_bytes: int) -> str:
    """The largest tier that a GPU with this much memory belongs to."""
    fitting = [name for name in TIERS if memory_bytes >= CARD_SHARE * GIB * int(name.removesuffix("gb"))]
    if not fitting:
        raise UserError(
            f"this GPU has {memory_bytes / GIB:.1f} GB, less than the smallest tier of {next(iter(TIERS))}; choose "
            "a size without --hardware, such as --num_layers 6 --embd_size 384 --num_heads 6 --mini_batch_size 8"
        )
    return fitting[-1]


def divide_batch(values: dict[str, Any]) -> dict[str, Any]:
    """The values with micro-batches that are no larger than the batch: a size may have a longer context."""
    size = int(values["mini_batch_size"])
    while size > 1 and size * values["context_length"] > values["total_batch_size"]:
        size = _find_smaller(size)
    return {**values, "mini_batch_size": size}


def fit_batch(values: dict[str, Any], estimate: Callable[[int], int], memory_bytes: int) -> dict[str, Any]:
    """The values with micro-batches small enough for this much memory, and more of them: batches stay as they are.

    `estimate` tells the bytes that micro-batches of so many windows take.
    """
    room, size = USED_SHARE * memory_bytes, int(values["mini_batch_size"])
    while estimate(size) > room:
        if size == 1:
            raise UserError(
                f"one window at a time takes about {estimate(1) / GIB:.1f} GB, and this GPU has "
                f"{memory_bytes / GIB:.1f} GB; use a smaller size, a shorter --context_length, or "
                "--gradient_checkpointing full"
            )
        size = _find_smaller(size)
    return {**values, "mini_batch_size": size}


def _find_smaller(size: int) -> int:
    """Half of it, or the nearest below that which divides it too."""
    return next(smaller for smaller in range(size // 2, 0, -1) if size % smaller == 0)
