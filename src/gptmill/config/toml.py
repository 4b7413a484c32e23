"""Writes a RunConfig as TOML that `load_recipe` reads back."""

from __future__ import annotations

import json
from typing import Any

from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields, list_values


def dump_toml(config: RunConfig, *, comments: bool = False) -> str:
    """Every field under its section; fields that are unset appear as comments, since TOML has no null."""
    values = list_values(config)
    lines: list[str] = []
    section = ""
    for field in list_fields(RunConfig):
        if field.section != section:
            section = field.section
            lines += ["", f"[{section}]"]
        if field.name not in values:
            continue  # of a variant that is not chosen
        value = values[field.name]
        # Where None is not the default, leaving the field out would bring the default back.
        is_unset = value is None and field.default is None
        text = f"# {field.name} is not set" if is_unset else f"{field.name} = {dump_value(value)}"
        lines.append(f"{text:<36}  # {field.help}" if comments else text)
    return "\n".join(lines[1:]) + "\n"


def dump_value(value: Any) -> str:
    """A value as TOML, or the text that a recipe has for none."""
    if value is None:
        return '"none"'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
