"""JSON has no NaN and no infinity, and losses do."""

from __future__ import annotations

import math
from typing import Any


def replace_non_finite(value: Any) -> Any:
    """The same value with null in place of numbers that are not finite, so that every JSON reader takes it."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
