"""Options of gptmill import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImportRequest:
    """Import"""

    out: str | None = None
    """Run to make: a name in logdir, or the path of a folder. Required."""
    tokenizer: str | None = None
    """Tokenizer instead of the model's own: a name, or the path of a tokenizer.json."""
    logdir: str = "runs"
    """Folder that contains all runs."""
    overwrite: bool = False
    """Replace a run that exists."""
