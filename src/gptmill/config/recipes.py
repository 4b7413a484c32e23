"""Recipes: TOML files that set fields of a RunConfig and may extend another recipe.

Precedence: defaults < recipe < command line.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from gptmill.config.errors import ConfigError, Problem, UserError, suggest
from gptmill.config.plugins import PART_FIELDS, UnloadedOption, UnloadedOptions, load_plugins, split_names
from gptmill.config.renamed import RENAMED_FIELDS, add_unrecorded, find_repeated_fields
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, find_inapplicable, list_fields, merge_values, parse_typed
from gptmill.config.synonyms import suggest_option
from gptmill.config.toml_text import read_toml
from gptmill.config.trust import admit_plugins, load_trusted_plugins, name_addresses, suspect_addresses
from gptmill.config.validation import find_problems

SHIPPED = Path(str(resources.files("gptmill.config"))) / "recipes"
DATA_SOURCES = ("corpus", "data_dir", "mixture")


@cache
def list_recipes() -> dict[str, str]:
    """Titles of the shipped recipes by name."""
    return {path.stem: read_title(path) for path in sorted(SHIPPED.glob("*.toml"), key=lambda path: path.stem)}


@dataclass
class _Reading:
    """How a recipe and those that it extends are read, and what is found."""

    loads_plugins: bool = True
    needs_plugins: bool = True
    allows_changes: bool | None = None
    """Of a run that resumes, whether other code may go on with it."""
    keeps_unknown: bool = False
    """Whether a plug-in is named and not loaded, whose parts and options are then unknown."""
    problems: list[Problem] = field(default_factory=list)
    unloaded: list[UnloadedOption] = field(default_factory=list)


def load_recipe(name_or_path: str) -> dict[str, Any]:
    """The values that a recipe and the recipes it extends set, by field name; raises ConfigError with all problems.

    Loads the plug-ins that it names. A file of a run names only those that are trusted: see `gptmill.config.trust`.
    """
    return _read(name_or_path, _Reading())


def load_saved_settings(path: Path, *, needs_plugins: bool = True, allows_changes: bool = False) -> dict[str, Any]:
    """The values in the config.toml of a run that goes on, with those that it had before gptmill recorded them.

    Other plug-ins may replace those that it names, which are then loaded only if they are trusted.
    """
    return add_unrecorded(_read(str(path), _Reading(needs_plugins=needs_plugins, allows_changes=allows_changes)))


def read_saved_config(path: Path) -> RunConfig:
    """The config of a run that is only looked at: no plug-in is loaded, and what belongs to one stays as text."""
    reading = _Reading(loads_plugins=False)
    config = build_config(RunConfig, add_unrecorded(_read(str(path), reading)))
    return replace(config, plugins=replace(config.plugins, unloaded=UnloadedOptions(tuple(reading.unloaded))))


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


def _read(name_or_path: str, reading: _Reading) -> dict[str, Any]:
    values = _load(_find(name_or_path, Path()), (), reading)
    if reading.problems:
        raise ConfigError(reading.problems)
    return values


def _load(path: Path, trail: tuple[Path, ...], reading: _Reading) -> dict[str, Any]:
    if path in trail:
        chain = " extends ".join(str(step) for step in (*trail, path))
        raise UserError(f"circular extends: {chain}; remove one of the extends lines")
    table = read_toml(path, "recipe")
    is_foreign = any(map(_is_of_run, (*trail, path)))
    _load_plugins(path, table.get("plugins"), reading, is_foreign=is_foreign)
    parent = table.pop("extends", None)
    values: dict[str, Any] = {}
    if isinstance(parent, str):
        try:
            values = _load(_find(parent, path.parent), (*trail, path), reading)
        except ConfigError:
            raise
        except UserError as error:
            raise UserError(f"{path} extends {parent!r}: {error}") from None
    elif parent is not None:
        reading.problems.append(
            Problem(f"{path}: extends = {parent!r}", "expected the name or path of a recipe in quotes")
        )
    own: dict[str, Any] = {}
    for section, content in table.items():
        own.update(_read_section(path, section, content, reading))
    if is_foreign:
        suspect_addresses(own, str(path))
    else:
        name_addresses(own.values())
    return merge_values(RunConfig, values, own)


def _is_of_run(path: Path) -> bool:
    """Whether a recipe is a file of a run, which may come from a stranger, and none that the user has written."""
    written = ("events.jsonl", "ledger.jsonl", "checkpoints/step_*")
    return path.name == "config.toml" or any(
        (folder / "config.toml").is_file() and any(any(folder.glob(name)) for name in written)
        for folder in path.parents
    )


def _load_plugins(path: Path, section: Any, reading: _Reading, *, is_foreign: bool) -> None:
    """Loads the plug-ins that a recipe names, since their options may be keys of it.

    A file is looked for beside the recipe, then in the current folder; its path there replaces the name in `section`.
    """
    names = section.get("plugin") if isinstance(section, dict) else None
    if not isinstance(names, str):
        return
    found = [str(path.parent / name) if (path.parent / name).is_file() else name for name in split_names(names)]
    section["plugin"] = ",".join(os.path.relpath(name) if Path(name).is_file() else name for name in found)
    if not reading.loads_plugins:
        reading.keeps_unknown = True
    elif is_foreign and not reading.needs_plugins:
        load_trusted_plugins(section["plugin"])
    elif is_foreign:
        admit_plugins(section["plugin"], str(path), allows_changes=reading.allows_changes)
    else:
        load_plugins(section["plugin"])


def _read_section(path: Path, section: str, content: Any, reading: _Reading) -> dict[str, Any]:
    problems = reading.problems
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
        if reading.keeps_unknown and field is None:
            reading.unloaded.append(UnloadedOption(section, key, str(raw)))
        elif reading.keeps_unknown and key in PART_FIELDS and isinstance(raw, str):
            values[key] = raw
        elif field is None:
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
