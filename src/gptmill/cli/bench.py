"""gptmill bench: a recipe in, figures of this machine out."""

from __future__ import annotations

import sys

from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.requests import BenchRequest

SUMMARY = """\
Measures how fast RECIPE trains on this machine, with the flags on top: tokens/s, MFU, memory, and the time to the first
step. With --ablate it measures what each optimization brings: alone against the naive way, taken away from all
together, and all together. Every row is a real training of a few steps that leaves nothing behind. The data is random
tokens, unless flags name some. RECIPE is gpt2-124m on an NVIDIA GPU and demo elsewhere, or the path of a .toml file, or
one of these:
"""


def run(arguments: list[str]) -> int:
    named, flags, presets, request = parse_recipe_call("bench", SUMMARY, BenchRequest, arguments)
    from gptmill.experiments.bench.runner import choose_recipe, run_bench
    from gptmill.training.presets import resolve_presets

    recipe = choose_recipe(named, flags)
    is_measured = run_bench(recipe, resolve_presets(recipe, flags, presets), request, say)
    return 0 if is_measured else exit_codes.FAILED


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
