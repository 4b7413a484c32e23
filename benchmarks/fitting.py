"""How many steps of a recipe fit into a time budget, found by two short runs on this machine."""

from __future__ import annotations

import statistics
from pathlib import Path

from runs import Run, obtain

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config

TRIED_STEPS, TRIED_EVAL_FREQ = 64, 32
SPARE_SHARE, SPARE_SECONDS = 0.02, 3.0  # margin for variation and for process exit


def find_fitting_flags(recipe: str, flags: list[str], seconds: float, folder: Path, row_seconds: float) -> list[str]:
    """Returns flags with which a run ends in time, with as many evaluations as the recipe has. Fills the caches.

    Raises UserError if not even one step fits or a short run fails.
    """
    words = [*flags, "--eval_freq", str(TRIED_EVAL_FREQ), "--checkpoint_freq", "1000000"]
    # The first run may compile; the second, like the real run, finds a warm cache, so that one is measured.
    for name in ("first", "second"):
        run = obtain(folder / name, recipe, words, row_seconds, TRIED_STEPS)
        if run is None:
            raise UserError(f"{recipe} did not reach step {TRIED_STEPS}; see {folder / name}.txt")
    assert run is not None
    own_steps, own_freq = run.select("RunStarted")[0]["max_steps"], make_config(recipe, {}).evaluation.eval_freq
    evaluations = max(1, own_steps // own_freq)
    steps = count_steps(run, evaluations, seconds)
    if steps < evaluations:
        raise UserError(
            f"{recipe} has no time for {evaluations} evaluations in {seconds:.0f} s; give it more --seconds"
        )
    return ["--max_steps", str(steps), "--eval_freq", str(steps // evaluations)]


def count_steps(tried: Run, evaluations: int, seconds: float) -> int:
    """Returns a multiple of the number of evaluations; 0 or less if there is no time for them."""
    steps = tried.select("StepLogged")
    before = steps[0]["time"] - tried.started  # includes an evaluation and the first step
    speed = statistics.median(step["tokens_per_second"] for step in steps[len(steps) // 2 :])
    step_seconds = tried.select("RunStarted")[0]["tokens_per_step"] / speed
    check_seconds = statistics.median(time_checks(tried)[1:])
    left = seconds * (1 - SPARE_SHARE) - SPARE_SECONDS - before - evaluations * check_seconds
    return evaluations * int(left / step_seconds / evaluations)


def time_checks(run: Run) -> list[float]:
    """Returns the seconds of each evaluation, including the sample generated after it."""
    drawn = {event["step"]: event["time"] for event in run.select("SampleDrawn")}
    return [
        check["seconds"] + max(0.0, drawn.get(check["step"], 0.0) - check["time"]) for check in run.select("EvalDone")
    ]
