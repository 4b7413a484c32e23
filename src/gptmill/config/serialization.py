"""Writes configs: as TOML, as a recipe that extends another one, and as command-line flags."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.recipes import list_recipes, make_config
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields, list_values


def dump_toml(config: RunConfig, *, comments: bool = False) -> str:
    """All fields by section; unset ones appear as comments, since TOML has no null. `load_recipe` reads it back."""
    values = list_values(config)
    lines: list[str] = []
    for section, fields in groupby(list_fields(RunConfig), lambda field: field.section):
        lines += ["", f"[{section}]"]
        for field in fields:
            if field.name not in values:
                continue  # belongs to a variant that is not selected
            value = values[field.name]
            # If None is not the default, omitting the field would restore the default.
            is_unset = value is None and field.default is None
            text = f"# {field.name} is not set" if is_unset else f"{field.name} = {dump_value(value)}"
            lines.append(f"{text:<36}  # {field.help}" if comments else text)
        unloaded = (option for option in config.plugins.unloaded.values if option.section == section)
        lines += [f"{option.name} = {dump_value(option.value)}" for option in unloaded]
    return "\n".join(lines[1:]) + "\n"


def dump_value(value: Any) -> str:
    """The TOML form of a value; recipes write None as "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def format_flags(values: Mapping[str, Any]) -> list[str]:
    """Command-line arguments that set these values."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words.append(f"--{name}={'none' if value is None else value}")
    return words


def make_extension(path: Path, recipe: str | None, flags: dict[str, Any], required: set[str], title: str) -> str:
    """The text of a recipe at `path` that extends `recipe` and resolves to the same run as `recipe` with `flags`.

    It sets the fields that the flags change, and those in `required`.
    """
    own = list_values(make_config(recipe, flags))
    extended = list_values(make_config(recipe, {}))
    changed = {name for name, value in own.items() if name not in extended or value != extended[name]}
    lines = [f"# {title}"]
    if recipe is not None:
        lines.append(f"extends = {dump_value(_make_reference(path, recipe))}")
    section = ""
    for field in list_fields(RunConfig):
        if field.name not in own or field.name not in changed | required or field.name == "run_name":
            continue
        if field.section != section:
            section = field.section
            lines += ["", f"[{section}]"]
        lines.append(f"{field.name} = {dump_value(own[field.name])}")
    return "\n".join(lines) + "\n"


def check_extension_path(path: Path, recipe: str | None, *, may_overwrite: bool) -> None:
    """Raises UserError unless a recipe that extends `recipe` can be written to `path`."""
    if not path.name:
        raise UserError("--write needs a file name, e.g. tuned.toml")
    if path.suffix != ".toml":
        raise UserError(f"--write {path}: the name of a recipe must end in .toml; use {path}.toml")
    if not path.parent.is_dir():
        raise UserError(f"--write {path}: folder {path.parent} does not exist; create it or choose another one")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--write {path}: folder {path.parent} is not writable; choose another one")
    if path.is_dir():
        raise UserError(f"--write {path} is a folder; give the path of a file")
    if recipe is not None and recipe not in list_recipes() and path.exists() and path.samefile(recipe):
        raise UserError(f"--write {path} would extend itself; choose another file")
    if path.exists() and not may_overwrite:
        raise UserError(f"--write {path} already exists; choose another file, or add --overwrite")


def _make_reference(path: Path, recipe: str) -> str:
    """What `extends` in the recipe at `path` must say: the recipe's name, or its path relative to that folder."""
    if recipe in list_recipes():
        return recipe
    found = Path(recipe).resolve()
    if found.suffix != ".toml" or found.drive != path.resolve().drive:
        return str(found)
    return Path(os.path.relpath(found, path.resolve().parent)).as_posix()
