"""Hardware presets: model size, context length and batch sizes for common sizes of GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from gptmill.config.errors import UserError

HardwareName = Literal["auto", "8gb", "12gb", "16gb", "24gb", "48gb", "80gb", "141gb"]

# Resets what a recipe set for a model of another width.
DEFAULT_WIDTHS: dict[str, Any] = {"num_kv_heads": None, "head_size": None, "ffn_size": None}


def _make_preset(
    num_layers: int, embd_size: int, context_length: int, mini_batch_size: int, micro_batches: int
) -> dict[str, Any]:
    """A GPT-2 of this size, with heads of 64 channels and so many micro-batches per step."""
    return {
        **DEFAULT_WIDTHS,
        "num_layers": num_layers,
        "embd_size": embd_size,
        "num_heads": embd_size // 64,
        "context_length": context_length,
        "mini_batch_size": mini_batch_size,
        "total_batch_size": mini_batch_size * context_length * micro_batches,
    }


# Up to 24 GB as founding document 003 has them: 8 to 12 GB, 10 to 16 GB, and 24 GB or more. Its micro-batches are too
# large for those GPUs, and are halved until they fit, which leaves the batch as it is.
HARDWARE_PRESETS: dict[str, dict[str, Any]] = {
    "8gb": _make_preset(8, 512, 256, 64, 8),
    "12gb": _make_preset(12, 768, 256, 128, 4),
    "16gb": _make_preset(12, 768, 256, 128, 4),
    "24gb": _make_preset(24, 1024, 512, 256, 2),
    "48gb": _make_preset(24, 1024, 1024, 32, 16),
    "80gb": _make_preset(24, 1024, 1024, 64, 8),
    "141gb": _make_preset(36, 1280, 1024, 64, 8),
}
LEAST_GB = {"12gb": 10}  # where it is not the number in the name
GIB = 1 << 30
MIN_REPORTED_SHARE = 0.9  # of the nominal memory: error correction (ECC) takes some of it
USABLE_SHARE = 0.9  # of the reported memory: the CUDA context, fragmentation and the display take the rest


def choose_preset(memory_bytes: int) -> str:
    """The largest preset for a GPU with this much memory; raises UserError if all are larger."""
    nominal_gb = {name: LEAST_GB.get(name, int(name.removesuffix("gb"))) for name in HARDWARE_PRESETS}
    sizes = {name: MIN_REPORTED_SHARE * GIB * gigabytes for name, gigabytes in nominal_gb.items()}
    fitting = [name for name, size_bytes in sizes.items() if size_bytes <= memory_bytes]
    if not fitting:
        raise UserError(
            f"this GPU has {memory_bytes / GIB:.1f} GB, less than the smallest preset, {next(iter(sizes))}; "
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
