"""Former names of options, still accepted in recipes, on the command line and in saved configs; and what runs did
before an option existed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def use_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under the current names of their fields."""
    return {RENAMED_FIELDS.get(name, name): value for name, value in values.items()}


def find_repeated_fields(names: Iterable[str], aliases: Mapping[str, str] = RENAMED_FIELDS) -> dict[str, list[str]]:
    """Fields that are given under more than one name, with those names; `aliases` maps names to fields."""
    names_of: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        names_of.setdefault(aliases.get(name, name), []).append(name)
    return {field: found for field, found in names_of.items() if len(found) > 1}


def add_unrecorded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a saved run, with those that it had before gptmill recorded them."""
    unrecorded: dict[str, Any] = {"padded_softmax": True}
    if saved.get("feed_forward") == "moe":
        unrecorded["router_balance"] = "batch"
    return {**unrecorded, **saved}
