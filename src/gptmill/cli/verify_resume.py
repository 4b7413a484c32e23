"""gptmill verify-resume: a recipe in, a proof out."""

from __future__ import annotations

import sys

from gptmill.cli.flags import Command
from gptmill.config import exit_codes
from gptmill.config.recipes import find_recipe_problems, list_recipes, load_recipe
from gptmill.config.requests import PresetOptions, ProofRequest
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields

SUMMARY = """\
Proves on this machine that a killed run goes on bit-identically: trains RECIPE with the flags on top for a few steps,
once straight and once with a SIGKILL in the middle, and compares every tensor and every logged loss. The exit code is
0 if all are the same and 1 if they part. With --deterministic it also says what that costs. RECIPE is the path of a
.toml file, or one of these:
"""


def run(arguments: list[str]) -> int:
    summary = SUMMARY + "\n".join(f"  {name:<24}{title}" for name, title in list_recipes().items())
    command = Command(
        "verify-resume", "[RECIPE]", summary, (ProofRequest, PresetOptions, RunConfig), find_recipe_problems
    )
    asks_help = "-h" in arguments or "--help" in arguments
    names_recipe = not arguments[0].startswith("-") if arguments else False
    parsed = command.parse(arguments, load_recipe(arguments[0]) if asks_help and names_recipe else None)
    command.check_words(parsed.words, 0, 1)
    option_names = {field.name for kind in (ProofRequest, PresetOptions) for field in list_fields(kind)}
    flags = {name: value for name, value in parsed.values.items() if name not in option_names}
    from gptmill.training.presets import resolve_presets
    from gptmill.training.proof import prove_resume

    recipe = parsed.words[0] if parsed.words else None
    flags = resolve_presets(recipe, flags, build_config(PresetOptions, parsed.values))
    proof = prove_resume(recipe, flags, build_config(ProofRequest, parsed.values), say)
    for sentence in proof.sentences:
        say(sentence)
    return 0 if proof.is_exact else exit_codes.FAILED


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
