"""JSON: the one gate to its parser, in bounded time and memory whatever was written; and what JSON cannot express."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from gptmill.config.regular_files import read_regular

MAX_BYTES = 64 << 20  # of a file; the largest published tokenizers take half of this
MAX_VALUES = 2**22  # a value takes up to 100 bytes in memory
SMALL_CHARS = 2 * MAX_VALUES  # a value takes two characters
MAX_DEPTH = 64
MAX_INTEGER = 2**64 - 1  # of either sign
TOO_DEEP = "its values are nested too deeply"
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def read_json(path: Path, *, any_integers: bool = False) -> Any:
    """Parses a JSON file. Raises OSError for one that is too large or not a regular file, and else as `parse_json`.

    Published tokenizers have 10**30 for "no limit": `any_integers` is for files that other software wrote.
    """
    value = parse_record(read_regular(path, MAX_BYTES))
    check_values(value, any_integers=any_integers)
    return value


def parse_json(text: str | bytes, *, refuse_repeats: bool = False) -> Any:
    """Parses a JSON text; raises ValueError also for deep nesting, integers of more than 64 bits and too many values.

    Of names that an object repeats, the last counts, unless they are to be refused.
    """
    value = parse_record(text, refuse_repeats=refuse_repeats)
    check_values(value)
    return value


def parse_record(text: str | bytes, *, refuse_repeats: bool = False) -> Any:
    """Parses a record of a user's data, whose fields may hold what does not matter here: raises fewer errors."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if len(text) > SMALL_CHARS and _count_values(text) > MAX_VALUES:
        raise ValueError(
            f"it has more than {MAX_VALUES:,} values, too many to parse in memory; give one record per line, without "
            f"the fields that are not text"
        )
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeats if refuse_repeats else None)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(describe_error(error)) from None


def describe_error(error: ValueError) -> str:
    """What a parser found wrong; Python's advice on long integers is not for users."""
    return "an integer in it has too many digits" if "integer string conversion" in str(error) else str(error)


def check_values(value: Any, max_values: int = MAX_VALUES, *, any_integers: bool = False) -> None:
    """Raises ValueError for values that are nested too deeply, too many, or integers of more than 64 bits."""
    count = 0
    containers: list[Any] = [[value]]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in containers:
            count += len(container)
            for item in container.values() if type(container) is dict else container:
                kind = type(item)
                if kind is dict or kind is list:
                    inner.append(item)
                elif kind is int and not (any_integers or -MAX_INTEGER <= item <= MAX_INTEGER):
                    raise ValueError(f"{_name_item(container, item)} has more than 64 bits")
        if count > max_values:
            raise ValueError(f"it has more than {max_values:,} values")
        if not inner:
            return
        containers = inner
    raise ValueError(TOO_DEEP)


def _name_item(container: Any, item: int) -> str:
    names = [name for name, each in container.items() if each is item] if isinstance(container, dict) else []
    return f"the integer {names[0]!r:.60}" if names else "an integer in it"


def replace_non_finite(value: Any) -> Any:
    """Returns the value with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _count_values(content: str) -> int:
    """Counts the values outside strings, of which each but the first follows one of these characters."""
    structure = STRING.sub("", content)
    return sum(structure.count(sign) for sign in "[{,")


def _refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries
