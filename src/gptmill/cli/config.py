"""gptmill config: the recipes, and what one resolves to."""

from __future__ import annotations

import sys

from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.recipes import find_recipe_problems, list_recipes, make_config
from gptmill.config.requests import PresetOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields
from gptmill.config.sizes import list_sizes
from gptmill.config.toml import dump_toml
from gptmill.config.validation import check_config

VOCABULARY = 50_304  # GPT-2's, padded
SMALL_VOCABULARIES = {"byte": 320, "char": 128}  # padded; an alphabet's is a guess
SUMMARY = "list: the shipped recipes and sizes. show: the config that RECIPE and the flags resolve to, as a recipe."


def run(arguments: list[str]) -> int:
    command = Command("config", "list | show [RECIPE]", SUMMARY, (PresetOptions, RunConfig), find_recipe_problems)
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 2)
    action, *recipe = parsed.words
    if action == "list" and not recipe:
        for heading, names in (("recipes", list_recipes()), ("sizes, for --size", list_sizes())):
            sys.stdout.write(f"{heading}\n")
            sys.stdout.writelines(f"  {name:<26}{title}\n" for name, title in names.items())
        return 0
    if action != "show":
        raise UserError(f"gptmill config {' '.join(parsed.words)}: its forms are config list and config show [RECIPE]")
    from gptmill.models.flops import count_flops
    from gptmill.models.huggingface.layouts import describe_layout
    from gptmill.models.parameters import count_parameters
    from gptmill.training.presets import resolve_presets

    presets = build_config(PresetOptions, parsed.values)
    preset_names = {field.name for field in list_fields(PresetOptions)}
    flags = {name: value for name, value in parsed.values.items() if name not in preset_names}
    name = recipe[0] if recipe else None
    config = make_config(name, resolve_presets(name, flags, presets))
    check_config(config)
    vocabulary = SMALL_VOCABULARIES.get(config.data.tokenizer or "", VOCABULARY)
    count = count_parameters(config.model, vocabulary)
    active = f", {count.active:,} of them active for a token" if count.active != count.total else ""
    sys.stdout.write(f"# {count.total:,} parameters with a vocabulary of {vocabulary:,}{active}\n")
    flops = count_flops(config.model, vocabulary, config.model.context_length)
    sys.stdout.write(f"# {flops / 1e6:,.1f} MFLOP per trained token, forward and backward\n")
    sys.stdout.write(f"# published layout: {describe_layout(config.model)}\n")
    sys.stdout.write(dump_toml(config, comments=True))
    return 0
