"""Reads a config stored in a checkpoint, which may be old, damaged or untrusted."""

from __future__ import annotations

from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.renamed import find_repeated_fields, use_current_names
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields, parse_value
from gptmill.config.trust import load_trusted_plugins, suspect_addresses


def read_settings(kind: type, values: Any, source: str) -> dict[str, Any]:
    """Typed values of the fields of a config class; raises UserError, naming `source`, for values no run can have."""
    if not isinstance(values, dict):
        raise UserError(f"the config in {source} is not a table of settings; use another checkpoint")
    for names in find_repeated_fields(values).values():
        raise UserError(f"the config in {source} is damaged: {' and '.join(names)} are the same option")
    values = use_current_names(values)
    suspect_addresses(values, source)
    missing = _load_plugins(values.get("plugin"))
    known = {field.name for field in list_fields(RunConfig)}
    if unknown := sorted(values.keys() - known):
        advice = missing or "update gptmill"
        raise UserError(f"the config in {source} has the unknown option {unknown[0]!r:.100}; {advice}")
    settings = {}
    for field in list_fields(kind):
        if field.name in values:
            raw = values[field.name]
            try:
                settings[field.name] = None if raw is None and field.optional else parse_value(field, raw)
            except ValueError as error:
                problem = f"{field.name} = {raw!r:.100}: {error}"
                if missing:
                    raise UserError(f"the config in {source} has {problem}; {missing}") from None
                raise UserError(f"the config in {source} is damaged: {problem}") from None
    return settings


def _load_plugins(names: object) -> str:
    """Loads the plug-ins that a checkpoint names, as far as they are trusted; returns what to add for the others."""
    missing = ",".join(load_trusted_plugins(names if isinstance(names, str) else None))
    return f"it was trained with a plug-in: read it, and add --plugin {missing:.200}" if missing else ""
