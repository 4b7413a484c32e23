"""Options that had another name once. Runs on disk, recipes and scripts may still use it."""

from __future__ import annotations

from typing import Any

RENAMED_FIELDS = {
    "balance_loss": "router_aux_loss",
    "batch_stages": "batch_size_warmup",
    "context_stages": "context_warmup",
    "copy_tiers": "mirror_tiers",
    "copy_to": "mirror_to",
    "extra_heads": "mtp_heads",
    "read_ahead": "prefetch_batches",
}
RENAMED_CHOICES = {("guard", "heal"): "rollback"}


def use_current_names(values: dict[str, Any]) -> dict[str, Any]:
    """The same values under the names that fields have now."""
    return {RENAMED_FIELDS.get(name, name): value for name, value in values.items()}
