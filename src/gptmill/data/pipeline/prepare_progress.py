"""How far a preparation is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrepareProgress:
    """Bytes of the source as it is stored, and what has come of them."""

    bytes_done: int
    bytes_total: int
    text_bytes: int
    tokens: int
    bytes_kept: int
    text_bytes_kept: int
    """What an earlier attempt had done."""
    is_done: bool


Report = Callable[[PrepareProgress], None]
