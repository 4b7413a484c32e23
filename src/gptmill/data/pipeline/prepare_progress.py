"""Progress reports of a preparation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrepareProgress:
    """Stored source bytes read so far, and the text bytes and tokens that they gave."""

    bytes_done: int
    bytes_total: int
    text_bytes: int
    tokens: int
    resumed_bytes: int
    resumed_text_bytes: int
    """What an earlier, interrupted attempt had done."""
    is_done: bool


Report = Callable[[PrepareProgress], None]
