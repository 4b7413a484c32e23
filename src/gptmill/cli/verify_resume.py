"""gptmill verify-resume: checks that a killed run resumes bit-identically."""

from __future__ import annotations

from gptmill.cli.output import print_line
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.requests import VerifyResumeRequest

SUMMARY = """\
Checks on this machine that a killed run resumes bit-identically: trains RECIPE with the flags on top for a few steps,
once uninterrupted and once with a SIGKILL halfway, and compares every tensor and every logged loss. The exit code is 0
if all are identical and 1 if not. With --deterministic it also measures the cost of that option. RECIPE is the path of
a .toml file or one of these:
"""


def run(arguments: list[str]) -> int:
    recipe, flags, presets, request = parse_recipe_call("verify-resume", SUMMARY, VerifyResumeRequest, arguments)
    from gptmill.experiments.resume_check import check_resume
    from gptmill.training.presets import check_size_is_chosen, resolve_presets

    check_size_is_chosen(recipe, flags, presets, "verify-resume")
    check = check_resume(recipe, resolve_presets(recipe, flags, presets), request, print_line)
    for sentence in check.sentences:
        print_line(sentence)
    return 0 if check.is_exact else exit_codes.FAILED
