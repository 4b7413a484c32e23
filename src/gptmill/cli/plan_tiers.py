"""The part of gptmill plan that says what GPUs of each size train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptmill.cli.output import format_table

if TYPE_CHECKING:
    from gptmill.training.hardware_tiers import HardwareTier

COLUMNS = (
    "--hardware",
    "GPUs",
    "layers",
    "width",
    "context",
    "parameters",
    "micro-batch",
    "accumulation",
    "tokens/step",
    "memory",
    "largest --size",
)
LEFT_ALIGNED = ("--hardware", "GPUs", "largest --size")


def list_tier_lines(tiers: list[HardwareTier]) -> list[str]:
    """The table of tiers, and what its columns mean."""
    return [
        "what one GPU trains, by its memory: bf16, AdamW, fused kernels, GPT-2's vocabulary; memory by estimate",
        *format_table(COLUMNS, [_list_cells(tier) for tier in tiers], LEFT_ALIGNED),
        "micro-batch: the preset's, halved until it fits; largest --size: what fits at all, with --mini_batch_size 1 "
        "--gradient_checkpointing full",
        "train with: gptmill train --hardware auto --corpus my.txt",
    ]


def _list_cells(tier: HardwareTier) -> tuple[str, ...]:
    model, training = tier.config.model, tier.config.training
    numbers = (model.num_layers, model.embd_size, model.context_length)
    return (
        tier.name,
        tier.examples,
        *(f"{number:,}" for number in numbers),
        f"{tier.parameters / 1e6:,.0f} M",
        str(training.mini_batch_size),
        f"{tier.micro_batches} x",
        f"{training.total_batch_size:,}",
        f"{tier.needed_bytes / 1e9:,.1f} GB",
        tier.largest_size,
    )
