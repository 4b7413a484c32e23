"""Hardware presets: model size, context length and batch sizes for common sizes of GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from gptmill.config.errors import UserError

HardwareName = Literal["auto", "8gb", "12gb", "24gb", "80gb"]

# Resets what a recipe set for a model of another width.
DEFAULT_WIDTHS: dict[str, Any] = {"num_kv_heads": None, "head_size": None, "ffn_size": None}
HARDWARE_PRESETS: dict[str, dict[str, Any]] = {
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
SMALLEST_GPU_GB = {"8gb": 8, "12gb": 10, "24gb": 24, "80gb": 80}
MIN_REPORTED_SHARE = 0.9  # of the nominal memory: error correction (ECC) takes some of it
USABLE_SHARE = 0.9  # of the reported memory: the CUDA context, fragmentation and the display take the rest


def choose_preset(memory_bytes: int) -> str:
    """The largest preset for a GPU with this much memory; raises UserError if all are larger."""
    fitting = [name for name, size in SMALLEST_GPU_GB.items() if MIN_REPORTED_SHARE * GIB * size <= memory_bytes]
    if not fitting:
        raise UserError(
            f"this GPU has {memory_bytes / GIB:.1f} GB, less than the smallest preset, {next(iter(SMALLEST_GPU_GB))}; "
            "set sizes without --hardware, e.g. --num_layers 6 --embd_size 384 --num_heads 6 --mini_batch_size 8"
        )
    return fitting[-1]


def cap_micro_batch(values: dict[str, Any]) -> dict[str, Any]:
    """The values with mini_batch_size reduced to total_batch_size: a model preset may have a longer context."""
    size = int(values["mini_batch_size"])
    while size > 1 and size * values["context_length"] > values["total_batch_size"]:
        size = _shrink(size)
    return {**values, "mini_batch_size": size}


def fit_total_batch(values: dict[str, Any]) -> dict[str, Any]:
    """The values with total_batch_size rounded to whole micro-batches: flags may have changed their size."""
    micro_batch = int(values["mini_batch_size"]) * int(values["context_length"])
    return {**values, "total_batch_size": micro_batch * max(1, round(values["total_batch_size"] / micro_batch))}


def fit_micro_batch(values: dict[str, Any], estimate: Callable[[int], int], memory_bytes: int) -> dict[str, Any]:
    """The values with mini_batch_size reduced until it fits in memory; total_batch_size is unchanged.

    `estimate` returns the bytes needed at a mini_batch_size. Raises UserError if not even 1 fits.
    """
    usable_bytes, size = USABLE_SHARE * memory_bytes, int(values["mini_batch_size"])
    while estimate(size) > usable_bytes:
        if size == 1:
            raise UserError(
                f"a micro-batch of one window takes about {estimate(1) / GIB:.1f} GB, but this GPU has "
                f"{memory_bytes / GIB:.1f} GB; use a smaller model, a shorter --context_length, or "
                "--gradient_checkpointing full"
            )
        size = _shrink(size)
    return {**values, "mini_batch_size": size}


def _shrink(size: int) -> int:
    """The largest divisor of `size` up to half of it."""
    return next(smaller for smaller in range(size // 2, 0, -1) if size % smaller == 0)
