"""gptmill config: the recipes, and what one resolves to."""

from __future__ import annotations

import sys

from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.recipes import find_recipe_problems, list_recipes, make_config
from gptmill.config.run import RunConfig
from gptmill.config.toml import dump_toml
from gptmill.config.validation import check_config

SUMMARY = "list: the shipped recipes. show: the config that RECIPE and the flags resolve to, as a recipe."


def run(arguments: list[str]) -> int:
    command = Command("config", "list | show [RECIPE]", SUMMARY, (RunConfig,), find_recipe_problems)
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 2)
    action, *recipe = parsed.words
    if action == "list" and not recipe:
        for name, title in list_recipes().items():
            sys.stdout.write(f"{name:<24}{title}\n")
        return 0
    if action != "show":
        raise UserError(f"gptmill config {' '.join(parsed.words)}: its forms are config list and config show [RECIPE]")
    config = make_config(recipe[0] if recipe else None, parsed.values)
    check_config(config)
    sys.stdout.write(dump_toml(config, comments=True))
    return 0
