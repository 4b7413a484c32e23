"""The command line of verbs that take a recipe, flags on top of it, and options of their own."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from gptmill.cli.flags import Command
from gptmill.config.recipes import find_recipe_problems, list_recipes, load_recipe, load_recipe_plugins
from gptmill.config.requests import PresetOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields

Request = TypeVar("Request")


class RecipeCall(NamedTuple, Generic[Request]):
    """A parsed command line."""

    recipe: str | None
    flags: dict[str, Any]
    """Flags of the run's config, without presets and the verb's own options."""
    presets: PresetOptions
    request: Request


def parse_recipe_call(verb: str, summary: str, kind: type[Request], arguments: list[str]) -> RecipeCall[Request]:
    """Parses `gptmill VERB [RECIPE] …`; the help lists the recipes and shows the values of RECIPE as defaults."""
    summary += "\n".join(f"  {name:<24}{title}" for name, title in list_recipes().items())
    command = Command(verb, "[RECIPE]", summary, (kind, PresetOptions, RunConfig), find_recipe_problems)
    if (recipe := command.find_first_word(arguments)) is not None:
        load_recipe_plugins(recipe)
    asks_help = "-h" in arguments or "--help" in arguments
    names_recipe = not arguments[0].startswith("-") if arguments else False
    parsed = command.parse(arguments, load_recipe(arguments[0]) if asks_help and names_recipe else None)
    command.check_words(parsed.words, 0, 1)
    own: type = kind
    option_names = {field.name for each in (own, PresetOptions) for field in list_fields(each)}
    flags = {name: value for name, value in parsed.values.items() if name not in option_names}
    recipe = parsed.words[0] if parsed.words else None
    return RecipeCall(recipe, flags, build_config(PresetOptions, parsed.values), build_config(kind, parsed.values))
