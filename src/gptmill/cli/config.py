"""gptmill config: lists recipes and model sizes, shows resolved configs."""

from __future__ import annotations

import sys
from pathlib import Path

from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.recipes import find_recipe_problems, list_recipes, make_config, read_saved_config
from gptmill.config.requests import PresetOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields
from gptmill.config.serialization import dump_toml
from gptmill.config.sizes import list_sizes
from gptmill.config.trust import UntrustedError
from gptmill.config.validation import check_config

VOCABULARY = 50_304  # GPT-2's, padded
SMALL_VOCABULARIES = {"byte": 320, "char": 128}  # padded; that of char depends on the corpus
SUMMARY = "list: shipped recipes and model sizes. show: the resolved config of RECIPE and flags, as a recipe."


def run(arguments: list[str]) -> int:
    command = Command("config", "list | show [RECIPE]", SUMMARY, (PresetOptions, RunConfig), find_recipe_problems)
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 2)
    action, *recipe = parsed.words
    if action == "list" and not recipe:
        for heading, names in (("recipes", list_recipes()), ("model sizes, for --size", list_sizes())):
            sys.stdout.write(f"{heading}\n")
            sys.stdout.writelines(f"  {name:<26}{title}\n" for name, title in names.items())
        return 0
    if action != "show":
        raise UserError(f"gptmill config {' '.join(parsed.words)}: the usage is gptmill config list | show [RECIPE]")
    from gptmill.models.flops import count_flops
    from gptmill.models.huggingface.layouts import describe_layout
    from gptmill.models.parameters import count_parameters
    from gptmill.training.presets import resolve_presets

    presets = build_config(PresetOptions, parsed.values)
    preset_names = {field.name for field in list_fields(PresetOptions)}
    flags = {name: value for name, value in parsed.values.items() if name not in preset_names}
    name = recipe[0] if recipe else None
    try:
        config = make_config(name, resolve_presets(name, flags, presets))
    except UntrustedError:
        if name is None or parsed.values:
            raise
        config = read_saved_config(Path(name))
        sys.stdout.write(f"# the plug-in {config.plugins.plugin} is not loaded; what belongs to it is shown as text\n")
        sys.stdout.write(dump_toml(config, comments=True))
        return 0
    check_config(config)
    vocabulary = SMALL_VOCABULARIES.get(config.data.tokenizer or "", VOCABULARY)
    count = count_parameters(config.model, vocabulary)
    active = f", {count.active:,} of them active per token" if count.active != count.total else ""
    sys.stdout.write(f"# {count.total:,} parameters with a vocabulary of {vocabulary:,}{active}\n")
    flops = count_flops(config.model, vocabulary, config.model.context_length)
    sys.stdout.write(f"# {flops / 1e6:,.1f} MFLOP per trained token, forward and backward\n")
    sys.stdout.write(f"# Hugging Face architecture: {describe_layout(config.model)}\n")
    sys.stdout.write(dump_toml(config, comments=True))
    return 0
