"""How far a plan is off: it estimates peak memory, a probe predicts time and peak memory, then the run is trained.

    python benchmarks/plan_accuracy.py RECIPE ... [--flags "FLAGS OF GPTMILL TRAIN"] [--rounds N] [--json FILE]

Each round plans without and with --probe and then trains, from process start to exit, so that slow changes of the
machine meet both. The corpus must be prepared. Times are wall-clock: nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ERRORS = ("time_error", "memory_error", "estimate_error")
GPTMILL = [sys.executable, "-m", "gptmill"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--flags", default="", help="more flags of gptmill train, for all recipes")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", help="write all rounds to this file")
    options = parser.parse_args()
    rows = [
        measure(recipe, shlex.split(options.flags), number)
        for recipe in options.recipes
        for number in range(1, options.rounds + 1)
    ]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for recipe in options.recipes:
        found = [row for row in rows if row["recipe"] == recipe]
        time_error, memory_error, estimate_error = (statistics.median(row[name] for row in found) for name in ERRORS)
        print(
            f"{recipe}: median error of time {time_error:+.1%}, of peak memory {memory_error:+.1%}, "
            f"of its estimate {estimate_error:+.1%}"
        )


def measure(recipe: str, flags: list[str], number: int) -> dict[str, Any]:
    """One prediction and one run."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--logdir", folder]
        estimate = make_plan(recipe, *flags, *where)["memory_bytes"]
        plan = make_plan(recipe, *flags, *where, "--probe")
        started = time.monotonic()
        subprocess.run(
            [*GPTMILL, "train", recipe, *flags, *where, "--run_name", "real"], check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.monotonic() - started
        lines = (Path(folder) / "real/events.jsonl").read_bytes().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "StepLogged"]
    memory = 1e9 * max(step["memory_gb"] for step in steps)
    step_seconds = statistics.median(step["seconds"] / count for step, count in count_steps(steps))
    row = {
        "recipe": recipe,
        "flags": flags,
        "predicted_seconds": plan["seconds"],
        "seconds": seconds,
        "time_error": plan["seconds"] / seconds - 1,
        "predicted_memory": plan["memory_bytes"],
        "memory": memory,
        "memory_error": plan["memory_bytes"] / memory - 1,
        "estimated_memory": estimate,
        "estimate_error": estimate / memory - 1,
        "predicted_step": plan["probe"]["step_seconds"],
        "own_step_error": predict_with(plan, step_seconds) / seconds - 1,
        "step": step_seconds,
        "parts": plan["time"],
        "device": plan["device"],
    }
    print(
        f"{recipe}, round {number}: predicted {row['predicted_seconds']:,.1f} s, took {seconds:,.1f} s "
        f"({row['time_error']:+.1%}); predicted {row['predicted_memory'] / 1e9:,.3f} GB, took {memory / 1e9:,.3f} GB "
        f"({row['memory_error']:+.1%}), estimated {estimate / 1e9:,.3f} GB ({row['estimate_error']:+.1%}); "
        f"step {1000 * row['predicted_step']:,.1f} ms, {1000 * row['step']:,.1f} ms; "
        f"time by the run's own step {row['own_step_error']:+.1%}",
        flush=True,
    )
    return row


def make_plan(*words: str) -> dict[str, Any]:
    """What gptmill plan says."""
    planned = subprocess.run([*GPTMILL, "plan", *words, "--json"], check=True, stdout=subprocess.PIPE)
    plan: dict[str, Any] = json.loads(planned.stdout)
    return plan


def predict_with(plan: dict[str, Any], step_seconds: float) -> float:
    """The prediction with another step time: what is still off is not the noise of the machine."""
    training: float = plan["time"]["training"]
    return plan["seconds"] + training * (step_seconds / plan["probe"]["step_seconds"] - 1)


def count_steps(steps: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Each logged line with the number of steps that it covers."""
    before = 0
    counted = []
    for step in steps:
        counted.append((step, max(1, step["step"] - before)))
        before = step["step"]
    return counted


if __name__ == "__main__":
    main()
