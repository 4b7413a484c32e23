"""Which options of a run differ from their defaults."""

from __future__ import annotations

from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields, list_values


def find_changed(config: dict[str, str]) -> dict[str, str]:
    """Returns the options, as text by name, that are not at their defaults."""
    defaults = list_defaults()
    return {name: value for name, value in config.items() if defaults.get(name) != value}


def list_defaults() -> dict[str, str]:
    """Returns the defaults as text, those of parts that a run may choose included."""
    defaults = {field.name: str(field.default) for field in list_fields(RunConfig)}
    return defaults | {name: str(value) for name, value in list_values(RunConfig()).items()}
