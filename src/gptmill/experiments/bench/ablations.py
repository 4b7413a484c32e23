"""The ablations that `gptmill bench --ablate` measures, as data. Add a new optimization here."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

from gptmill.config.errors import UserError, suggest

NAIVE_KEY, BF16_KEY, PLAIN_KEY, ALL_KEY = "naive", "bf16", "plain", "all"
CUDA, FP8, MIXED = "cuda", "fp8", "mixed"
REQUIREMENTS = {
    CUDA: "an NVIDIA GPU",
    FP8: "an NVIDIA GPU with fp8 tensor cores",
    MIXED: "a CPU with bf16 instructions (every row is fp32)",
}

NAIVE_DESCRIPTION = "naive: fp32, unfused attention, no compilation or fused kernels, no data prefetching"
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
# The naive run of an architecture without the optimizations that change it.
PLAIN: dict[str, Any] = NAIVE | {
    "plugin": "gptmill.experiments.bench.separate_qkv",
    "attention": "separate_qkv",
    "feed_forward": "gelu",
    "tied_head": False,
}
ARCHITECTURE: dict[str, Any] = {"attention": "softmax", "feed_forward": "swiglu", "tied_head": True}
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
    """One configuration of the ablation: its key and title, the key of its baseline, and its flags."""

    key: str
    title: str
    baseline: str
    flags: dict[str, Any]
    requires: str = ""
    micro_batches: int = 1
    """Into how many micro-batches a micro-batch of the other rows is split."""


ROWS = (
    Row(NAIVE_KEY, "naive", "", NAIVE),
    Row(BF16_KEY, "mixed precision", NAIVE_KEY, NAIVE | {"precision": "bf16"}, MIXED),
    Row("flash", "flash attention", NAIVE_KEY, NAIVE | {"attention_backend": "auto"}),
    Row("compile", "compile", NAIVE_KEY, NAIVE | {"compile": True}),
    Row("graphs", "CUDA graphs", NAIVE_KEY, NAIVE | {"cuda_graphs": "on"}, CUDA),
    Row("data", "data prefetching", NAIVE_KEY, NAIVE | {"prefetch_batches": 3}),
    Row("fp8", "fp8", NAIVE_KEY, NAIVE | {"precision": "fp8"}, FP8),
    Row("accumulate", "gradient accumulation: 4 micro-batches", NAIVE_KEY, NAIVE, micro_batches=4),
    Row(PLAIN_KEY, "separate QKV, GELU, untied embeddings", NAIVE_KEY, PLAIN),
    Row("qkv", "fused QKV projection", PLAIN_KEY, PLAIN | {"attention": "softmax"}),
    Row("swiglu", "SwiGLU", PLAIN_KEY, PLAIN | {"feed_forward": "swiglu"}),
    Row("tying", "tied embeddings", PLAIN_KEY, PLAIN | {"tied_head": True}),
    Row("architecture", "all three of them", PLAIN_KEY, PLAIN | ARCHITECTURE),
    Row("head", "fused linear cross-entropy", BF16_KEY, NAIVE | {"precision": "bf16", "kernels": "head"}, CUDA),
    Row("kernels", "all fused kernels", BF16_KEY, NAIVE | {"precision": "bf16", "kernels": "auto"}, CUDA),
    Row(ALL_KEY, "all together", NAIVE_KEY, ALL),
    Row("no-bf16", "without mixed precision", ALL_KEY, ALL | {"precision": "fp32"}, MIXED),
    Row("no-flash", "without flash attention", ALL_KEY, ALL | {"attention_backend": "math"}),
    Row("no-compile", "without compile", ALL_KEY, ALL | {"compile": False}),
    Row("no-kernels", "without fused kernels", ALL_KEY, ALL | {"kernels": "none"}, CUDA),
    Row("no-data", "without data prefetching", ALL_KEY, ALL | {"prefetch_batches": 0}),
    Row("all+fp8", "with fp8", ALL_KEY, ALL | {"precision": "fp8"}, FP8),
    Row("all+accumulate", "with 4 micro-batches", ALL_KEY, ALL, micro_batches=4),
    Row("all+resident", "with data on the device", ALL_KEY, ALL | {"data_on_device": True}, CUDA),
)


def choose_rows(requested: str | None, capabilities: Set[str]) -> tuple[list[Row], list[str]]:
    """Returns the `requested` rows, or all, that the machine can run, and a line for each kind that it cannot."""
    keys = [row.key for row in ROWS]
    selected = keys if requested is None else [key.strip() for key in requested.split(",")]
    for key in selected:
        if key not in keys:
            raise UserError(
                f"--rows {requested}: there is no row {key!r}{suggest(key, keys)}; name some of {','.join(keys)}"
            )
    rows = [row for row in ROWS if row.key in selected]
    skipped = [
        f"skipped, since they need {described}: {', '.join(row.key for row in rows if row.requires == requirement)}"
        for requirement, described in REQUIREMENTS.items()
        if requirement not in capabilities and any(row.requires == requirement for row in rows)
    ]
    return [row for row in rows if not row.requires or row.requires in capabilities], skipped
