"""Trains a grid of models and fits the scaling law that `--budget` predicts losses with.

    python benchmarks/scaling.py --books books.txt.xz --shakespeare input.txt \
        --work runs/scaling [--device cuda] [--jobs 8] [--minutes 60] [--max_flops 1e13] [--fit_only] \
        [--budgets runs/budget] [--write]

Every run has the batch, context and rates that a budget would choose for it, and is scored on all of the validation
text. Runs are in order of importance; those whose result is in WORK/results.jsonl are not repeated, so that the command
can be interrupted, or limited by --minutes, and started again. Losses do not depend on the machine's load, so that
--jobs can be trained side by side; on a GPU they need its multi-process service (nvidia-cuda-mps-control -d). Prints
each run, the fitted constants, residuals, the error on the runs of the largest compute, predicted from the others, and
how far the law's picks are behind the best of runs that had the same time or took the same compute.
The package ships the results so far; new ones are added to these, or replace them. With --budgets, the runs of
benchmarks/budget.py in that folder are added: what budgets chose, and what others did with the same time.
--write puts results and constants into the package.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from budget_results import read_budget_results
from scaling_grid import Cell, make_cells
from scaling_picks import print_picks
from scaling_runs import list_measured
from texts import CORPORA, find_density, write_texts

import gptmill
from gptmill.config.optimizer import OptimizerConfig
from gptmill.data.tokenizers.bpe_training import train_tokenizer
from gptmill.evals.text_loss import count_bytes
from gptmill.experiments.budget.candidate import MAX_MICRO_BATCH, choose_batch, find_longest_context
from gptmill.experiments.budget.choice import BATCHES
from gptmill.experiments.budget.family import FAMILY
from gptmill.experiments.budget.fitted_law import load_fit
from gptmill.experiments.budget.law_fit import MeasuredRun, fit_law, list_errors
from gptmill.experiments.budget.learning_rates import choose_rates
from gptmill.experiments.budget.scaling_law import ScalingLaw
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone

TOKENIZER_BYTES = 2_000_000
LAW_FILE = Path(gptmill.__file__).parent / "experiments" / "budget" / "law.json"
USUAL_DECAY = OptimizerConfig().weight_decay


def prepare(work: Path, corpus: str, vocab_size: int) -> tuple[Path, float, int]:
    """The shards of a corpus, and the bytes of a validation token and the tokens of an epoch."""
    folder, text = work / "data" / f"{corpus}-{vocab_size}", work / f"{corpus}.txt"
    tokenizer = "byte"
    if vocab_size > 256:
        path = work / "data" / f"{corpus}-{vocab_size}.json"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            texts = [text.read_text(encoding="utf-8")]
            path.write_text(train_tokenizer(texts, vocab_size, TOKENIZER_BYTES, lambda _: None).definition, "utf-8")
        tokenizer = str(path)
    val = str(work / f"{corpus}_val.txt")
    if (folder / "manifest.json").exists():
        shards = gptmill.open_corpus(folder)
    else:
        shards = gptmill.prepare(text, val_source=val, tokenizer=tokenizer, out=folder, progress=False)
    tokens = shards.tokens("val")[0]
    return folder, count_bytes(shards.tokenizer, tokens) / len(tokens), shards.info.train.tokens


def train(cell: Cell, work: Path, device: str) -> dict[str, Any]:
    """Trains a cell; returns its result."""
    torch.set_num_threads(1)
    folder, bytes_per_token, epoch_tokens = prepare(work, cell.corpus, cell.vocab_size)
    context = cell.context_length or find_longest_context(cell.tokens)
    wanted = cell.batch * choose_batch(cell.tokens, epoch_tokens)
    tokens_per_step = min(
        (batch for batch in BATCHES if batch >= context), key=lambda batch: abs(math.log(batch / wanted))
    )
    steps = cell.tokens // tokens_per_step
    rates = choose_rates(cell.optimizer, cell.embd_size, steps)
    rates["max_lr"] *= cell.embedding_rate
    if "matrix_lr" in rates:
        rates["matrix_lr"] *= cell.matrix_rate
    started = time.monotonic()
    shutil.rmtree(work / "runs" / cell.name, ignore_errors=True)
    run = gptmill.train(
        None, data_dir=str(folder), context_length=context, total_batch_size=tokens_per_step, device=device,
        mini_batch_size=min(tokens_per_step, MAX_MICRO_BATCH) // context, max_steps=steps, dropout=cell.dropout,
        shift_windows=True, eval_freq=10**9, eval_tokens=10**9, sample_tokens=0, log_freq=10, compile=False,
        checkpoint_freq=10**9, keep_checkpoints=1, guard="warn", run_name=cell.name, logdir=str(work / "runs"),
        weight_decay=cell.weight_decay * USUAL_DECAY, progress=False,
        **{**FAMILY, **cell.shape.list_values(), "optimizer": cell.optimizer, **rates},
    )  # fmt: skip
    losses = [event.val_loss for event in read_events(run.directory.events) if isinstance(event, EvalDone)]
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    return {
        "name": cell.name,
        **asdict(cell),
        "context_length": context,
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "matrix_lr": rates.get("matrix_lr"),
        "density": find_density(work, cell.corpus),
        "epoch_tokens": epoch_tokens,
        "bytes_per_token": bytes_per_token,
        "loss": losses[-1],
        "bits_per_byte": losses[-1] / math.log(2) / bytes_per_token,
        "seconds": time.monotonic() - started,
    }


def read_results(work: Path) -> dict[str, dict[str, Any]]:
    """Results so far, by the name of their cell."""
    path = work / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def run_grid(options: argparse.Namespace, work: Path) -> None:
    """Trains what is missing, several cells at a time, and writes each result as it comes."""
    deadline = time.monotonic() + 60 * options.minutes
    for corpus in CORPORA:
        write_texts(work, corpus, getattr(options, corpus, None))
    done = read_results(work)
    cells = [cell for cell in make_cells() if cell.name not in done and cell.flops <= options.max_flops]
    for corpus, vocab_size in sorted({(cell.corpus, cell.vocab_size) for cell in cells}):
        prepare(work, corpus, vocab_size)
    running: dict[Future[dict[str, Any]], Cell] = {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        while running or (cells and time.monotonic() < deadline):
            while cells and len(running) < options.jobs and time.monotonic() < deadline:
                cell = cells.pop(0)
                running[pool.submit(train, cell, work, options.device)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                if error := future.exception():
                    print(f"{cell.name}: {error}", flush=True)
                    continue
                result = future.result()
                with (work / "results.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
                print(
                    f"{cell.name}: {result['bits_per_byte']:.4f} bits per byte, {result['seconds']:.0f} s", flush=True
                )
    if cells:
        print(f"time is up: {len(cells)} runs are left")


def print_fit(runs: dict[str, list[tuple[str, MeasuredRun]]]) -> ScalingLaw:
    """Fits the smaller runs and prints the errors, those on the largest ones too; returns the law of all."""
    law = fit_law([run for _, run in runs["smaller"]])
    print("\n| run | bits per byte | predicted | error |\n|---|---:|---:|---:|")
    for kind, named in runs.items():
        errors = list_errors(law, [run for _, run in named])
        for (name, run), error in zip(named, errors, strict=True):
            predicted = run.bits_per_byte / math.exp(error)
            print(f"| {name} ({kind}) | {run.bits_per_byte:.4f} | {predicted:.4f} | {error:+.2%} |")
        print(f"| mean absolute error of {len(errors)} {kind} runs | | | {fmean(map(abs, errors)):.2%} |")
    every = [run for named in runs.values() for _, run in named]
    law = fit_law(every)
    print(f"| mean absolute error, all {len(every)} fitted | | | {fmean(map(abs, list_errors(law, every))):.2%} |")
    print(f"\n{law}")
    return law


def print_sweeps(results: list[dict[str, Any]]) -> None:
    """Prints runs that differ in rates or batch only, beside each other."""
    print("\n| sweep | dropout, batch, rates | bits per byte |\n|---|---|---:|")
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(result["name"].partition("-d")[0], []).append(result)
    for name, group in groups.items():
        for result in group if len(group) > 1 else []:
            print(f"| {name} | {result['name'].removeprefix(name + '-')} | {result['bits_per_byte']:.4f} |")


def format_law(content: dict[str, list[dict[str, Any]]]) -> str:
    """JSON with one line for each run."""
    lines = {name: ",\n  ".join(map(json.dumps, rows)) for name, rows in content.items()}
    return "{\n" + ",\n".join(f' "{name}": [\n  {rows}\n ]' for name, rows in lines.items()) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", help="text of books, may be .xz")
    parser.add_argument("--shakespeare", help="input.txt")
    parser.add_argument("--work", default="runs/scaling", help="folder for texts, shards, runs and results")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, with one thread each")
    parser.add_argument("--max_flops", type=float, default=math.inf, help="leave out larger runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--fit_only", action="store_true", help="train nothing, fit the results so far")
    parser.add_argument("--budgets", nargs="+", type=Path, default=[], help="folders of benchmarks/budget.py")
    parser.add_argument("--write", action="store_true", help="write the fit into the package")
    options = parser.parse_args()
    work = Path(options.work)
    if not options.fit_only:
        if missing := [name for name in ("books", "shakespeare") if getattr(options, name) is None]:
            parser.error(f"the grid needs {', '.join(f'--{name}' for name in missing)}")
        work.mkdir(parents=True, exist_ok=True)
        run_grid(options, work)
    of_budgets = [row for folder in options.budgets for row in read_budget_results(folder)]
    every = {row["name"]: row for row in (*load_fit()["results"], *read_results(work).values(), *of_budgets)}
    results = list(every.values())
    measured = list_measured(results)
    law = print_fit(measured)
    runs = {name: run for named in measured.values() for name, run in named}
    print_picks(law, runs, every)
    print_sweeps(results)
    if options.write:
        rows = [{"name": name, "measured": asdict(run)} for name, run in runs.items()]
        LAW_FILE.write_text(format_law({"law": [asdict(law)], "runs": rows, "results": results}), encoding="utf-8")
        print(f"\nwrote {LAW_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
