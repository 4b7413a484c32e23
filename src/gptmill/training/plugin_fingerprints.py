"""Fingerprints of the plug-ins' code that a run depends on: no run continues with other code unnoticed."""

from __future__ import annotations

from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.plugins import PARTS
from gptmill.config.run import RunConfig


def list_plugin_fingerprints(config: RunConfig, tokenizer: str) -> dict[str, str]:
    """The registered parts that determine the run's numbers, each as "KIND NAME" with the hash of its code."""
    model, optimizer = config.model, config.optimizer
    chosen = {
        "architecture": model.architecture.tag,
        "attention": model.attention.tag,
        "feed_forward": model.feed_forward.tag,
        "optimizer": optimizer.optimizer.tag,
        "schedule": optimizer.schedule.tag,
        "tokenizer": tokenizer,
    }
    parts = (PARTS.get(item) for item in chosen.items())
    return {f"{part.kind} {part.name}": part.fingerprint for part in parts if part is not None}


def check_plugins(saved: Any, config: RunConfig, tokenizer: str, source: str, allows_changes: bool) -> None:
    """Raises UserError if a part's code is not that which the checkpoint was made with, unless changes are allowed."""
    saved = saved if isinstance(saved, dict) else {}
    for name, fingerprint in list_plugin_fingerprints(config, tokenizer).items():
        if saved.get(name, fingerprint) != fingerprint and not allows_changes:
            raise UserError(
                f"the code of {name} has changed since {source} was saved; restore it, or add --allow_changes to "
                f"resume with the new code"
            )
