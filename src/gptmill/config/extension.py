"""A recipe that extends another: the text of one that gives the same run as that recipe and some flags do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.recipes import list_recipes, make_config
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_fields, list_values
from gptmill.config.toml import dump_value


def check_target(path: Path, recipe: str | None, *, may_overwrite: bool) -> None:
    """Raises UserError unless a recipe that extends `recipe` can be written there."""
    if not path.name:
        raise UserError("--write needs the name of a file, such as tuned.toml")
    if path.suffix != ".toml":
        raise UserError(f"--write {path}: a recipe's name ends in .toml; write {path}.toml")
    if not path.parent.is_dir():
        raise UserError(f"--write {path}: there is no folder {path.parent}; make it first, or name another")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--write {path}: nothing can be written to that folder; name another")
    if path.is_dir():
        raise UserError(f"--write {path} is a folder; name a file in it")
    if recipe is not None and recipe not in list_recipes() and path.exists() and path.samefile(recipe):
        raise UserError(f"--write {path} would extend itself; name another file")
    if path.exists() and not may_overwrite:
        raise UserError(f"--write {path} exists; name another file, or add --overwrite")


def make_extension(path: Path, recipe: str | None, flags: dict[str, Any], stated: set[str], title: str) -> str:
    """The text for `path`: every field in which the flags change the recipe's run, and those that are to be stated."""
    own = list_values(make_config(recipe, flags))
    extended = list_values(make_config(recipe, {}))
    changed = {name for name, value in own.items() if name not in extended or value != extended[name]}
    lines = [f"# {title}"]
    if recipe is not None:
        lines.append(f"extends = {dump_value(_find_from(path, recipe))}")
    section = ""
    for field in list_fields(RunConfig):
        if field.name not in own or field.name not in changed | stated or field.name == "run_name":
            continue
        if field.section != section:
            section = field.section
            lines += ["", f"[{section}]"]
        lines.append(f"{field.name} = {dump_value(own[field.name])}")
    return "\n".join(lines) + "\n"


def _find_from(path: Path, recipe: str) -> str:
    """The recipe's name, or its path as seen from the folder of the new one."""
    if recipe in list_recipes():
        return recipe
    found = Path(recipe).resolve()
    if found.suffix != ".toml" or found.drive != path.resolve().drive:
        return str(found)
    return Path(os.path.relpath(found, path.resolve().parent)).as_posix()
