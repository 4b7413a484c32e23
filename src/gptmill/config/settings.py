"""A config that comes back from a file, which may be a stranger's."""

from __future__ import annotations

from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.renamed import use_current_names
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields, parse_value


def read_settings(kind: type, values: Any, place: str) -> dict[str, Any]:
    """The fields of a config class among values that `place` holds; raises UserError for what no run could have had."""
    if not isinstance(values, dict):
        raise UserError(f"the config in {place} is none; use another checkpoint")
    values = use_current_names(values)
    known = {field.name for field in list_fields(RunConfig)}
    if unknown := sorted(values.keys() - known):
        raise UserError(f"the config in {place} has {unknown[0]!r:.100}, unknown to this gptmill; update gptmill")
    settings = {}
    for field in list_fields(kind):
        if field.name in values:
            raw = values[field.name]
            try:
                settings[field.name] = None if raw is None and field.optional else parse_value(field, raw)
            except ValueError as error:
                raise UserError(f"the config in {place} is damaged: {field.name} = {raw!r:.100}: {error}") from None
    return settings
