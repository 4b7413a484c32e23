"""make_config: the config of a run from a recipe and keywords."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gptmill.config import recipes
from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.keywords import parse_keywords
from gptmill.config.run import RunConfig
from gptmill.config.validation import check_config, find_problems

Recipe = str | os.PathLike[str]


def make_config(recipe: Recipe | None = None, **fields: Any) -> RunConfig:
    """The config of a recipe, by name or path, with fields on top; without a recipe, GPT-2 124M.

    The fields are the flags of gptmill train. Raises one ConfigError that names every problem.
    """
    name = None if recipe is None else os.fspath(recipe)
    config = recipes.make_config(name, parse_fields(name, fields))
    check_config(config)
    return config


def parse_fields(recipe: str | None, fields: Mapping[str, object]) -> dict[str, Any]:
    """The typed values of the fields; where one is wrong, ConfigError names the recipe's other problems too."""
    if recipe is not None:
        recipes.load_recipe_plugins(recipe)
    values, problems = parse_keywords(RunConfig, fields)
    if problems:
        raise ConfigError(problems + _find_other_problems(recipe, values))
    return values


def _find_other_problems(recipe: str | None, values: dict[str, Any]) -> list[Problem]:
    try:
        return find_problems(recipes.make_config(recipe, values))
    except ConfigError as error:
        return error.problems
    except UserError as error:
        return [Problem(str(recipe), str(error))]
