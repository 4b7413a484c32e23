"""gptmill bench: measures training throughput on this machine."""

from __future__ import annotations

from gptmill.cli.output import print_line
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.requests import BenchRequest

SUMMARY = """\
Benchmarks RECIPE with the flags on top: tokens/s, MFU, memory, and time to the first step. --ablate measures every
optimization alone on a naive baseline, all of them together, and all but each one. Every row is a short real training
run, deleted afterwards, on random tokens unless flags name data. RECIPE is the path of a .toml file or one of these
(default: gpt2-124m on an NVIDIA GPU, demo elsewhere):
"""


def run(arguments: list[str]) -> int:
    named, flags, presets, request = parse_recipe_call("bench", SUMMARY, BenchRequest, arguments)
    from gptmill.experiments.bench.runner import choose_recipe, run_bench
    from gptmill.training.presets import resolve_presets

    recipe = choose_recipe(named, flags)
    has_results = run_bench(recipe, resolve_presets(recipe, flags, presets), request, print_line)
    return 0 if has_results else exit_codes.FAILED
