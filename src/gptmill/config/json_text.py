"""JSON: parses what a stranger may have written, and replaces what JSON cannot express."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text; raises ValueError if it is not valid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def replace_non_finite(value: Any) -> Any:
    """Returns the value with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
