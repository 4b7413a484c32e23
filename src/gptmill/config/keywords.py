"""Options given as keywords in Python: the same names, types and errors as on the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from gptmill.config.errors import ConfigError, Problem
from gptmill.config.plugins import load_installed_plugins, load_plugins
from gptmill.config.renamed import RENAMED_FIELDS, find_repeated_fields
from gptmill.config.schema import build_config, list_fields, parse_typed
from gptmill.config.synonyms import suggest_option
from gptmill.config.trust import name_addresses

T = TypeVar("T")


def parse_keywords(cls: type, given: Mapping[str, object]) -> tuple[dict[str, Any], list[Problem]]:
    """The typed values by current field name, and all problems: unknown and repeated names, values of a wrong type.

    Loads the plug-ins that `plugin` names first, since their options are fields too.
    """
    load_installed_plugins()
    if isinstance(plugin := given.get("plugin"), str | os.PathLike):
        load_plugins(os.fspath(plugin))
    name_addresses(given.values())
    fields = {field.name: field for field in list_fields(cls)}
    problems = [
        Problem(" and ".join(names), f"are two names of the same option; keep {name} only")
        for name, names in find_repeated_fields(given).items()
    ]
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = fields.get(RENAMED_FIELDS.get(name, name))
        if field is None:
            problems.append(Problem(name, f"unknown option{suggest_option(name, fields)}"))
            continue
        try:
            values[field.name] = parse_typed(field, _make_plain(value))
        except ValueError as error:
            problems.append(Problem(f"{name} = {value!r:.100}", str(error)))
    return values, problems


def build_request(cls: type[T], given: Mapping[str, object]) -> T:
    """An instance of a class of options; raises ConfigError with all problems of the keywords."""
    values, problems = parse_keywords(cls, given)
    if problems:
        raise ConfigError(problems)
    return build_config(cls, values)


def _make_plain(value: object) -> object:
    """Paths as text, and NumPy's numbers as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value
