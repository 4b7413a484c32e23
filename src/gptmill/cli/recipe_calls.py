"""The command line of a verb that is given a recipe with flags on top, and options of its own."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from gptmill.cli.flags import Command
from gptmill.config.recipes import find_recipe_problems, list_recipes, load_recipe
from gptmill.config.requests import PresetOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields

Request = TypeVar("Request")


class RecipeCall(NamedTuple, Generic[Request]):
    """What was typed."""

    recipe: str | None
    flags: dict[str, Any]
    """Of the run, without presets and without the verb's own."""
    presets: PresetOptions
    request: Request


def parse_recipe_call(verb: str, summary: str, kind: type[Request], arguments: list[str]) -> RecipeCall[Request]:
    """`gptmill VERB [RECIPE] …`; the summary is followed by the list of recipes, and help shows the recipe's values."""
    summary += "\n".join(f"  {name:<24}{title}" for name, title in list_recipes().items())
    command = Command(verb, "[RECIPE]", summary, (kind, PresetOptions, RunConfig), find_recipe_problems)
    asks_help = "-h" in arguments or "--help" in arguments
    names_recipe = not arguments[0].startswith("-") if arguments else False
    parsed = command.parse(arguments, load_recipe(arguments[0]) if asks_help and names_recipe else None)
    command.check_words(parsed.words, 0, 1)
    own: type = kind
    option_names = {field.name for each in (own, PresetOptions) for field in list_fields(each)}
    flags = {name: value for name, value in parsed.values.items() if name not in option_names}
    recipe = parsed.words[0] if parsed.words else None
    return RecipeCall(recipe, flags, build_config(PresetOptions, parsed.values), build_config(kind, parsed.values))
