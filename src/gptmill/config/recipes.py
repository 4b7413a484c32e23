"""Recipes: TOML files that set fields of a RunConfig and may extend another recipe.

Precedence: defaults < recipe < command line.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from gptmill.config.errors import ConfigError, Problem, UserError, suggest
from gptmill.config.plugins import load_plugins, split_names
from gptmill.config.renamed import RENAMED_FIELDS, add_unrecorded, find_repeated_fields
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, find_inapplicable, list_fields, merge_values, parse_typed
from gptmill.config.synonyms import suggest_option
from gptmill.config.toml_text import read_toml
from gptmill.config.validation import find_problems

SHIPPED = Path(str(resources.files("gptmill.config"))) / "recipes"
DATA_SOURCES = ("corpus", "data_dir", "mixture")


@cache
def list_recipes() -> dict[str, str]:
    """Titles of the shipped recipes by name."""
    return {path.stem: read_title(path) for path in sorted(SHIPPED.glob("*.toml"), key=lambda path: path.stem)}


def load_recipe(name_or_path: str) -> dict[str, Any]:
    """The values that a recipe and the recipes it extends set, by field name; raises ConfigError with all problems."""
    problems: list[Problem] = []
    values = _load(_find(name_or_path, Path()), (), problems)
    if problems:
        raise ConfigError(problems)
    return values


def load_saved_settings(path: Path) -> dict[str, Any]:
    """The values in the config.toml of a run, with those that it had before gptmill recorded them."""
    return add_unrecorded(load_recipe(str(path)))


def load_recipe_plugins(recipe: str) -> None:
    """Loads the plug-ins of a recipe, since their options are fields; `load_recipe` reports what is wrong with it."""
    with suppress(UserError):
        load_recipe(recipe)


def make_config(recipe: str | None, flags: dict[str, Any]) -> RunConfig:
    """The config of a recipe with flags on top."""
    return layer_config(drop_replaced_data(load_recipe(recipe) if recipe else {}, flags), flags)


def drop_replaced_data(values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The values without the data that the flags replace, and without the settings that apply to that data only.

    A new text is tokenized like the recipe's. Prepared shards bring their tokenizer. "none" unsets its own field alone.
    """
    given = {name for name in DATA_SOURCES if flags.get(name) is not None}
    if not given:
        return values
    replaced = {*DATA_SOURCES} if "corpus" in given else {*DATA_SOURCES, "tokenizer"}
    return {name: value for name, value in values.items() if name not in replaced}


def layer_config(*layers: dict[str, Any]) -> RunConfig:
    """The config of several layers of values, later ones on top.

    Raises ConfigError for unknown names and for values that apply only to a variant that is not selected, together
    with all other problems.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        values = merge_values(RunConfig, values, layer)
    known = [field.name for field in list_fields(RunConfig)]
    problems = [Problem(name, f"unknown option{suggest_option(name, known)}") for name in values if name not in known]
    for name, owners in find_inapplicable(RunConfig, values).items():
        variants = " or ".join(f"{field} {tag}" for field, tag in owners)
        field, tag = owners[0]
        problems.append(
            Problem(f"{name} = {values[name]}", f"applies only to {variants}; add --{field} {tag}, or remove it")
        )
    config = build_config(RunConfig, values)
    if problems:
        raise ConfigError(problems + find_problems(config))
    return config


def find_recipe_problems(words: list[str], flags: dict[str, Any]) -> list[Problem]:
    """Problems of the recipe among `words`, and of its config with the flags on top; other flags are the verb's own."""
    recipe = next((word for word in words if word.endswith(".toml") or word in list_recipes()), None)
    names = {field.name for field in list_fields(RunConfig)}
    try:
        return find_problems(make_config(recipe, {name: value for name, value in flags.items() if name in names}))
    except ConfigError as error:
        return error.problems
    except UserError as error:
        return [Problem(str(recipe), str(error))]


def _load(path: Path, trail: tuple[Path, ...], problems: list[Problem]) -> dict[str, Any]:
    if path in trail:
        chain = " extends ".join(str(step) for step in (*trail, path))
        raise UserError(f"circular extends: {chain}; remove one of the extends lines")
    table = read_toml(path, "recipe")
    _load_plugins(path, table.get("plugins"))
    parent = table.pop("extends", None)
    values: dict[str, Any] = {}
    if isinstance(parent, str):
        try:
            values = _load(_find(parent, path.parent), (*trail, path), problems)
        except ConfigError:
            raise
        except UserError as error:
            raise UserError(f"{path} extends {parent!r}: {error}") from None
    elif parent is not None:
        problems.append(Problem(f"{path}: extends = {parent!r}", "expected the name or path of a recipe in quotes"))
    own: dict[str, Any] = {}
    for section, content in table.items():
        own.update(_read_section(path, section, content, problems))
    return merge_values(RunConfig, values, own)


def _load_plugins(path: Path, section: Any) -> None:
    """Loads the plug-ins that a recipe names, since their options may be keys of it.

    A file is looked for beside the recipe, then in the current folder; its path there replaces the name in `section`.
    """
    names = section.get("plugin") if isinstance(section, dict) else None
    if not isinstance(names, str):
        return
    found = [str(path.parent / name) if (path.parent / name).is_file() else name for name in split_names(names)]
    section["plugin"] = ",".join(os.path.relpath(name) if Path(name).is_file() else name for name in found)
    load_plugins(section["plugin"])


def _read_section(path: Path, section: str, content: Any, problems: list[Problem]) -> dict[str, Any]:
    fields = {field.name: field for field in list_fields(RunConfig)}
    sections = {field.section for field in fields.values()}
    if section in sections and not isinstance(content, dict):
        problems.append(Problem(f"{path}: {section} = {content!r}", f"expected a section [{section}]"))
        return {}
    if section not in sections:
        known = ", ".join(f"[{name}]" for name in sorted(sections))
        hint = f"{suggest(section, sections)}; the sections are {known}"
        if field := fields.get(RENAMED_FIELDS.get(section, section)):
            hint = f": {section} belongs under [{field.section}]"
        elif not isinstance(content, dict):
            hint = suggest_option(section, fields) or hint
        problems.append(Problem(f"{path}: {section}", f"unknown section{hint}"))
        return {}
    for name, keys in find_repeated_fields(content).items():
        advice = f"are two names of the same option; keep {name} only"
        problems.append(Problem(f"{path}: [{section}] {' and '.join(keys)}", advice))
    values: dict[str, Any] = {}
    for key, raw in content.items():
        field = fields.get(RENAMED_FIELDS.get(key, key))
        where = f"{path}: [{section}] {key}"
        if field is None:
            problems.append(Problem(where, f"unknown key{suggest_option(key, fields)}"))
        elif field.section != section:
            problems.append(Problem(where, f"belongs under [{field.section}]"))
        else:
            try:
                values[field.name] = parse_typed(field, raw)
            except ValueError as error:
                problems.append(Problem(f"{where} = {raw!r}", str(error)))
    return values


def _find(name_or_path: str, base: Path) -> Path:
    """The path of a shipped recipe, or of a file if the text ends in .toml or contains a folder."""
    path = base / name_or_path
    if path.suffix == ".toml" or len(Path(name_or_path).parts) > 1:
        if path.exists():
            return path.resolve()
        raise UserError(f"recipe {path} does not exist; give the path of a .toml file or one of {_names()}")
    if name_or_path in list_recipes():
        return SHIPPED / f"{name_or_path}.toml"
    near = suggest(name_or_path, list_recipes())
    raise UserError(f"unknown recipe {name_or_path!r}{near}; give the path of a .toml file or one of {_names()}")


def _names() -> str:
    return ", ".join(list_recipes())


def read_title(path: Path) -> str:
    """The title of a recipe: the first line of its comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").rstrip()
