"""Values as the flags that give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def spell_flags(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that gives these values again."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words.append(f"--{name}={'none' if value is None else value}")
    return words
