"""What `gptmill bench --ablate` measures, as data. A new optimization is added here."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

from gptmill.config.errors import UserError, suggest

NAIVE_KEY, BF16_KEY, ALL_KEY = "naive", "bf16", "all"
CUDA, FP8, MIXED = "cuda", "fp8", "mixed"
NEEDS = {
    CUDA: "an NVIDIA GPU",
    FP8: "an NVIDIA GPU that multiplies in fp8",
    MIXED: "a CPU that multiplies in bf16, so that all is in fp32",
}

NAIVE_DESCRIPTION = "naive: fp32, plain attention, nothing compiled or fused, data read within the step"
NAIVE: dict[str, Any] = {
    "precision": "fp32",
    "fp8_layers": None,
    "attention_backend": "math",
    "compile": False,
    "cuda_graphs": "off",
    "kernels": "none",
    "prefetch_batches": 0,
    "data_on_device": False,
}
ALL: dict[str, Any] = {
    "precision": "bf16",
    "fp8_layers": None,
    "attention_backend": "auto",
    "compile": True,
    "cuda_graphs": "auto",
    "kernels": "auto",
    "prefetch_batches": 3,
    "data_on_device": False,
}


class Row(NamedTuple):
    """One training: what it is called, the row that it is compared with, and how it is set up."""

    key: str
    title: str
    base: str
    flags: dict[str, Any]
    needs: str = ""
    micro_batches: int = 1
    """In how many pieces a micro-batch of the others is computed."""


ROWS = (
    Row(NAIVE_KEY, "naive", "", NAIVE),
    Row(BF16_KEY, "mixed precision", NAIVE_KEY, NAIVE | {"precision": "bf16"}, MIXED),
    Row("flash", "flash attention", NAIVE_KEY, NAIVE | {"attention_backend": "auto"}),
    Row("compile", "compile", NAIVE_KEY, NAIVE | {"compile": True}),
    Row("graphs", "CUDA graphs", NAIVE_KEY, NAIVE | {"cuda_graphs": "on"}, CUDA),
    Row("data", "data read ahead", NAIVE_KEY, NAIVE | {"prefetch_batches": 3}),
    Row("fp8", "fp8", NAIVE_KEY, NAIVE | {"precision": "fp8"}, FP8),
    Row("accumulate", "accumulation: quarter micro-batches", NAIVE_KEY, NAIVE, micro_batches=4),
    Row("head", "fused head", BF16_KEY, NAIVE | {"precision": "bf16", "kernels": "head"}, CUDA),
    Row("kernels", "fused head and other kernels", BF16_KEY, NAIVE | {"precision": "bf16", "kernels": "auto"}, CUDA),
    Row(ALL_KEY, "all together", NAIVE_KEY, ALL),
    Row("no-bf16", "without mixed precision", ALL_KEY, ALL | {"precision": "fp32"}, MIXED),
    Row("no-flash", "without flash attention", ALL_KEY, ALL | {"attention_backend": "math"}),
    Row("no-compile", "without compile", ALL_KEY, ALL | {"compile": False}),
    Row("no-kernels", "without fused head and other kernels", ALL_KEY, ALL | {"kernels": "none"}, CUDA),
    Row("no-data", "without data read ahead", ALL_KEY, ALL | {"prefetch_batches": 0}),
    Row("all+fp8", "and fp8", ALL_KEY, ALL | {"precision": "fp8"}, FP8),
    Row("all+accumulate", "and quarter micro-batches", ALL_KEY, ALL, micro_batches=4),
    Row("all+resident", "and data in the device's memory", ALL_KEY, ALL | {"data_on_device": True}, CUDA),
)


def choose_rows(wanted: str | None, abilities: Set[str]) -> tuple[list[Row], list[str]]:
    """The rows whose keys are `wanted`, or all, as far as the machine has what they need; and what is left out."""
    keys = [row.key for row in ROWS]
    asked = keys if wanted is None else [key.strip() for key in wanted.split(",")]
    for key in asked:
        if key not in keys:
            raise UserError(
                f"--rows {wanted}: there is no row {key!r}{suggest(key, keys)}; name some of {','.join(keys)}"
            )
    rows = [row for row in ROWS if row.key in asked]
    left_out = [
        f"left out for want of {described}: {', '.join(row.key for row in rows if row.needs == need)}"
        for need, described in NEEDS.items()
        if need not in abilities and any(row.needs == need for row in rows)
    ]
    return [row for row in rows if not row.needs or row.needs in abilities], left_out
