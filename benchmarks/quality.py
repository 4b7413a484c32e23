"""Validation loss of recipes over wall time, counted from process start, on the whole validation split.

    python benchmarks/quality.py RECIPE ... [--data_dir DIR] [--flags "--dropout 0.1"] [--seconds 600] [--out FOLDER]
    python benchmarks/quality.py --ablate [--data_dir DIR] [--only NAME ...] [--jobs 4]

Trains each recipe with `gptmill train` and prints its best and last validation loss, and when it first reached its
target loss. DIR replaces the recipe's data_dir. With --seconds a run gets as many steps as fit into that time on this
machine, found by two short runs, instead of the recipe's number. --out gets a table (.csv) and a plot (.svg) of each
run's losses, and a plot of all runs.

--ablate trains books-124m-modern, then variants with one part changed, for as many steps; --jobs trains several at a
time, which changes their speed, not their losses. A run that is complete in --logdir with the same code, recipe and
flags is read, not trained again. Exits with 1 if a run fails or misses its target.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path
from typing import NamedTuple

from curves import draw, make_curve
from fitting import find_fitting_flags
from runs import Run, check_corpus, make_absolute, make_run_folder, obtain, open_jobs, run_guarded

from gptmill.config.errors import UserError, suggest
from gptmill.config.recipes import load_recipe, make_config

ABLATED = "books-124m-modern"
WHOLE = 10**9  # validation tokens: the whole split


class Target(NamedTuple):
    """A validation loss and the seconds within which a run must reach it."""

    loss: float
    seconds: float


# nanoGPT on one H200 reached 1.4656 after about 55 s and 3.961 after 345 s; the books have 85 % and 35 % of that.
TARGETS = {
    "shakespeare-char": Target(1.465, 45.0),
    "books-124m": Target(3.961, 293.0),
    ABLATED: Target(3.961, 120.0),
}
VARIANTS = {
    "baseline": "",
    "AdamW for Muon": "--optimizer adamw --max_lr 1e-3",
    "no QK-norm": "--no_qk_norm",
    "learned positions for rotary": "--positions learned",
    "GELU for ReLU²": "--feed_forward gelu",
    "SwiGLU for ReLU²": "--feed_forward swiglu --ffn_size 2048",
    "value embeddings": "--value_embeddings 1",
    "untied head": "--no_tied_head",
    "6 layers and value embeddings": "--num_layers 6 --value_embeddings 1",
    "no dropout": "--dropout 0",
    "no zero-init": "--no_zero_init",
    "cosine for WSD": "--schedule cosine",
    "layer norm for RMS norm": "--norm layernorm",
    "linear biases": "--bias",
    "12 heads of width 64": "--num_heads 12",
    "logit soft-cap at 15": "--logit_softcap 15",
    "document masks": "--documents masked",
    "no window shift": "--no_shift_windows",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures validation loss over wall time.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--data_dir", help="prepared shards that replace the recipe's own")
    parser.add_argument("--flags", default="", help="more flags for every run, in quotes")
    parser.add_argument("--seconds", type=float, help="time budget that replaces the recipe's number of steps")
    parser.add_argument("--ablate", action="store_true", help=f"{ABLATED} with one part changed at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="train these variants and the baseline only")
    parser.add_argument("--jobs", type=int, default=1, help="variants to train concurrently")
    parser.add_argument("--logdir", default="runs/quality")
    parser.add_argument("--out", help="folder for tables and plots of the curves")
    parser.add_argument("--row_seconds", type=int, default=900, help="timeout of a run")
    options = parser.parse_args()
    if not options.recipes and not options.ablate:
        parser.error(f"name a recipe, such as {', '.join(TARGETS)} or enwik8, or use --ablate")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    try:
        check(options)
    except UserError as error:
        parser.error(str(error))
    logdir = Path(options.logdir).resolve()
    known: dict[str, Run] = {}
    failed = []
    if options.recipes:
        failed += measure_recipes(options, logdir, known)
    if options.ablate:
        names = [name for name in VARIANTS if not options.only or name in ("baseline", *options.only)]
        failed += ablate(names, options, logdir, known)
    if options.out and known:
        write_curves(known, Path(options.out))
    if failed:
        print(f"\nfailed or missed the target: {'; '.join(failed)}")
    return 1 if failed else 0


def check(options: argparse.Namespace) -> None:
    """Raises UserError for mistakes that would otherwise show only after training, or never."""
    if options.seconds is not None and options.ablate:
        raise UserError("--seconds is for recipes; variants all train the same number of steps: drop one of the two")
    if options.only and not options.ablate:
        raise UserError("--only selects variants of --ablate; add --ablate or drop --only")
    for name in options.only or []:
        if name not in VARIANTS:
            raise UserError(f"no variant is called {name!r}{suggest(name, VARIANTS)}; they are: {', '.join(VARIANTS)}")
    for recipe in options.recipes:
        load_recipe(recipe)
    if options.data_dir:
        check_corpus(options.data_dir)
    if options.out:
        try:
            Path(options.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {options.out}: {error.strerror or error}; name another folder") from None


def measure_recipes(options: argparse.Namespace, logdir: Path, known: dict[str, Run]) -> list[str]:
    """Prints the table and adds runs to `known`; returns the recipes that failed or missed their target."""
    print("| recipe | parameters | steps | seconds | best loss (bits) | last loss | training | target | met after |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    failed = []
    for recipe in options.recipes:
        flags, met = options.flags, None
        if options.seconds is not None:
            words = make_words(recipe, options.data_dir, flags)
            folder = make_run_folder(make_name(recipe), logdir / "fitting")
            fitting = find_fitting_flags(recipe, words, options.seconds, folder, options.row_seconds)
            flags = " ".join([flags, *fitting])
        run = measure(make_name(recipe), recipe, options.data_dir, flags, logdir, options.row_seconds)
        if run is not None:
            known[make_name(recipe)] = run
            met = find_met(run, TARGETS[recipe].loss) if recipe in TARGETS else None
        if run is None or (recipe in TARGETS and (met is None or met > TARGETS[recipe].seconds)):
            failed.append(recipe)
        print(describe(recipe, run, met), flush=True)
    return failed


def ablate(names: list[str], options: argparse.Namespace, logdir: Path, known: dict[str, Run]) -> list[str]:
    """Prints the table of variants and adds runs to `known`; returns the variants that failed."""
    print("| | flags | parameters | last loss | difference | tokens/s | seconds |")
    print("|---|---|---:|---:|---:|---:|---:|")
    failed, base = [], None

    def train(name: str) -> Run | None:
        flags = f"{VARIANTS[name]} {options.flags}"
        seconds, is_alone = options.row_seconds, options.jobs == 1
        return measure(name, ABLATED, options.data_dir, flags, logdir / "ablation", seconds, is_alone=is_alone)

    with open_jobs(options.jobs) as pool:
        for name, run in zip(names, pool.map(train, names), strict=True):
            if run is None:
                failed.append(name)
            else:
                known[name] = run
                base = list_losses(run)[-1][1] if base is None else base
            print(describe_variant(name, run, base), flush=True)
    return failed


def describe_variant(name: str, run: Run | None, base: float | None) -> str:
    """Returns a row of the ablation table; `base` is the loss of the baseline."""
    if run is None or base is None:
        return f"| {name} | `{VARIANTS[name]}` | failed | | | | |"
    loss, steps = list_losses(run)[-1][1], run.select("StepLogged")
    total = sum(step["tokens_per_second"] * step["seconds"] for step in steps)
    speed = total / sum(step["seconds"] for step in steps)
    changed = f"`{VARIANTS[name]}`" if VARIANTS[name] else ""
    parameters = run.select("RunStarted")[0]["parameters"]
    numbers = f"{parameters:,} | {loss:.4f} | {loss - base:+.4f} | {speed:,.0f} | {find_end(run):.0f}"
    return f"| {name} | {changed} | {numbers} |"


def measure(
    name: str,
    recipe: str,
    data_dir: str | None,
    flags: str,
    logdir: Path,
    seconds: float,
    *,
    is_alone: bool = True,
) -> Run | None:
    """Trains unless the run is complete; None if training failed."""
    words = make_words(recipe, data_dir, flags)
    return obtain(make_run_folder(name, logdir), recipe, words, seconds, is_alone=is_alone)


def make_words(recipe: str, data_dir: str | None, flags: str) -> list[str]:
    """Returns all flags of a run."""
    return [*make_data_flags(recipe, data_dir), "--eval_tokens", str(WHOLE), *flags.split()]


def make_data_flags(recipe: str, data_dir: str | None) -> list[str]:
    """Returns the --data_dir flag; nothing for a recipe that prepares its own corpus or reads a mixture."""
    data = make_config(recipe, {}).data
    found = data_dir or (data.data_dir if data.corpus is None else None)
    return ["--data_dir", make_absolute(found)] if found else []


def make_name(recipe: str) -> str:
    """Returns the name of a recipe, which may be a path."""
    return Path(recipe).name.removesuffix(".toml")


def list_losses(run: Run) -> list[tuple[float, float]]:
    """Returns (seconds, loss) of every evaluation; the EMA loss where it is lower."""
    losses = []
    for event in run.select("EvalDone"):
        found = [loss for loss in (event["val_loss"], event["ema_loss"]) if loss is not None]
        losses.append((event["time"] - run.started, min(found, default=math.nan)))
    return losses


def find_met(run: Run, loss: float) -> float | None:
    """Returns the seconds until an evaluation reached the loss; None if none did."""
    return next((seconds for seconds, found in list_losses(run) if found <= loss), None)


def find_end(run: Run) -> float:
    """Returns the seconds from process start to the end of the run."""
    return float(run.select("RunFinished")[-1]["time"] - run.started)


def describe(recipe: str, run: Run | None, met: float | None) -> str:
    """Returns a row of the table."""
    if run is None:
        return f"| {make_name(recipe)} | failed | | | | | | | |"
    losses = [loss for _, loss in list_losses(run)]
    best = min((loss for loss in losses if loss == loss), default=math.nan)
    training = run.select("StepLogged")[-1]["loss"]
    numbers = (
        *(f"{run.select('RunStarted')[0]['parameters']:,}", f"{run.last_step:,}", f"{find_end(run):.1f}"),
        *(
            f"{best:.4f} ({best / math.log(2):.4f})",
            f"{losses[-1]:.4f}",
            "–" if training is None else f"{training:.4f}",
        ),
    )
    target = TARGETS.get(recipe)
    aim = f"{target.loss} in {target.seconds:.0f} s" if target else "–"
    after = "–" if target is None else "never" if met is None else f"{met:.1f} s"
    return f"| {make_name(recipe)} | {' | '.join(numbers)} | {aim} | {after} |"


def write_curves(known: dict[str, Run], folder: Path) -> None:
    """Writes a table and a plot of each run, and a plot of all runs."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = []
    for name, run in known.items():
        curve = make_curve(name, run)
        stem = make_run_folder(name, folder)
        if curve.validation or curve.training:  # a diverged run may have no finite loss
            curves.append(curve)
            stem.with_name(f"{stem.name}.svg").write_text(draw([curve]), encoding="utf-8")
        with stem.with_name(f"{stem.name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("step", "seconds", "loss", "val_loss"))
            for event in (*run.select("StepLogged"), *run.select("EvalDone")):
                seconds = f"{event['time'] - run.started:.3f}"
                table.writerow((event["step"], seconds, event.get("loss", ""), event.get("val_loss", "")))
    if len(curves) > 1:
        (folder / "together.svg").write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
