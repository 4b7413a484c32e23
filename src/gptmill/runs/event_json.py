"""Events as lines of events.jsonl, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from gptmill.config.json_text import parse_record, replace_non_finite
from gptmill.runs.events import EVENTS, EvalDone, Event, TrainEvalDone

MAX_INT = 2**63 - 1
MAX_TIME = 253_402_300_800.0  # the year 10,000, which datetime cannot represent


def to_json(event: Event) -> str:
    """Returns the event as a line of events.jsonl."""
    record: dict[str, Any] = {"event": type(event).__name__, **vars(event)}
    if isinstance(event, EvalDone | TrainEvalDone):
        record["perplexity"] = event.perplexity
    return json.dumps(replace_non_finite(record), ensure_ascii=False)


def from_json(line: str) -> Event | None:
    """Returns the event of a line, ignoring fields that a newer gptmill added; None for an event that it added.

    Raises ValueError, KeyError, TypeError or OverflowError for what gptmill cannot have written.
    """
    record: dict[str, Any] = parse_record(line)
    kind = EVENTS.get(record["event"])
    if kind is None:
        return None
    known = [item for item in fields(kind) if item.name in record]
    event = kind(**{item.name: READERS[str(item.type)](record[item.name]) for item in known})
    if event.step < 0 or not 0 <= event.time < MAX_TIME:
        raise ValueError("its step or time is impossible")
    return event


def _read_float(value: Any) -> float:
    """Returns the number; NaN for a null, which stands for one that is not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value)


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("not an integer")
    if not -MAX_INT <= value <= MAX_INT:
        raise OverflowError("more than 64 bits")
    return value


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _read_list(read_item: Callable[[Any], Any], value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return [read_item(item) for item in value]


def _read_dict(read_item: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return {name: read_item(item) for name, item in value.items()}


# By the type of a field. A line may come from another version, a damaged disk or an editor.
READERS: dict[str, Callable[[Any], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "float | None": lambda value: None if value is None else _read_float(value),
    "str": _read_str,
    "list[int]": partial(_read_list, _read_int),
    "list[str]": partial(_read_list, _read_str),
    "dict[str, float]": partial(_read_dict, _read_float),
    "dict[str, str]": partial(_read_dict, _read_str),
}
