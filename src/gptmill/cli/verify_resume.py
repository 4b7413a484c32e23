"""gptmill verify-resume: a recipe in, a proof out."""

from __future__ import annotations

import sys

from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import exit_codes
from gptmill.config.requests import VerifyResumeRequest

SUMMARY = """\
Proves on this machine that a killed run goes on bit-identically: trains RECIPE with the flags on top for a few steps,
once straight and once with a SIGKILL in the middle, and compares every tensor and every logged loss. The exit code is
0 if all are the same and 1 if they part. With --deterministic it also says what that costs. RECIPE is the path of a
.toml file, or one of these:
"""


def run(arguments: list[str]) -> int:
    recipe, flags, presets, request = parse_recipe_call("verify-resume", SUMMARY, VerifyResumeRequest, arguments)
    from gptmill.experiments.resume_check import check_resume
    from gptmill.training.presets import resolve_presets

    proof = check_resume(recipe, resolve_presets(recipe, flags, presets), request, say)
    for sentence in proof.sentences:
        say(sentence)
    return 0 if proof.is_exact else exit_codes.FAILED


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
