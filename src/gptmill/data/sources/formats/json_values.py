"""Parses JSON in bounded memory: a short text can hold so many values that parsing it takes gigabytes."""

from __future__ import annotations

import re
from typing import Any

from gptmill.config.json_text import parse_json

MAX_VALUES = 2**22  # a value takes up to 100 bytes
SMALL_CHARS = 2 * MAX_VALUES  # a value takes two characters
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def parse_values(content: str) -> Any:
    """Parses a JSON text. Raises ValueError if it is not valid, or has too many or too deeply nested values."""
    if len(content) > SMALL_CHARS and count_values(content) > MAX_VALUES:
        raise ValueError(
            f"it has more than {MAX_VALUES:,} values, too many to parse in memory; give one record per line, without "
            f"the fields that are not text"
        )
    return parse_json(content)


def count_values(content: str) -> int:
    """Counts the values outside strings, of which each but the first follows one of these characters."""
    structure = STRING.sub("", content)
    return sum(structure.count(sign) for sign in "[{,")
