"""TOML: the one gate to its parser, in bounded time whatever was written. Knows no recipes and no tasks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.json_text import TOO_DEEP, check_values, describe_error
from gptmill.config.regular_files import read_regular

MAX_BYTES = 1 << 18  # a recipe with every option has a tenth of it
MAX_VALUES = 2000
MAX_KEY_PARTS = 16
TEXT = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"""|\Z)'
    r"|'''(?:[^']|'(?!''))*+(?:'''|\Z)"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
# For every line below a section, the parser walks through all parts of the section's name.
LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}")


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The values of a TOML file; raises UserError, naming the file as the recipe or task that it is."""
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {kind} {path}: {error.strerror or error}; check it and its permissions") from None
    try:
        text = content.decode("utf-8-sig")
        if LONG_KEY.search(TEXT.sub("_", text)):
            raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts")
        values = tomllib.loads(text)
        check_values(values, MAX_VALUES)
    except (ValueError, RecursionError) as error:
        reason = describe_error(error) if isinstance(error, ValueError) else TOO_DEEP
        raise UserError(f"{kind} {path} is not valid TOML: {reason}; fix the syntax there") from None
    return values
