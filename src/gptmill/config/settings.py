"""Reads a config stored in a checkpoint, which may be old, damaged or untrusted."""

from __future__ import annotations

from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.plugins import LOADED, split_names
from gptmill.config.renamed import find_repeated_fields, use_current_names
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields, parse_value


def read_settings(kind: type, values: Any, source: str) -> dict[str, Any]:
    """Typed values of the fields of a config class; raises UserError, naming `source`, for values no run can have."""
    if not isinstance(values, dict):
        raise UserError(f"the config in {source} is not a table of settings; use another checkpoint")
    for names in find_repeated_fields(values).values():
        raise UserError(f"the config in {source} is damaged: {' and '.join(names)} are the same option")
    values = use_current_names(values)
    known = {field.name for field in list_fields(RunConfig)}
    missing = _describe_missing_plugins(values.get("plugin"))
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


def _describe_missing_plugins(names: object) -> str:
    """What to add so that the plug-ins which a config names are loaded. A checkpoint never loads code by itself."""
    missing = [name for name in split_names(names if isinstance(names, str) else None) if name not in LOADED]
    return f"it was trained with a plug-in: add --plugin {','.join(missing)!s:.200}" if missing else ""
