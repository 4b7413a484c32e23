"""Trains a grid of models and fits the scaling law that `--budget` predicts losses with.

    python benchmarks/scaling.py --books books_train.txt.xz --books_val books_val.txt.xz --shakespeare input.txt \
        --work runs/scaling [--device cuda] [--jobs 8] [--minutes 60] [--max_flops 1e13] [--fit_only] [--write]

Every run has the batch, context and rates that a budget would choose for it, and is scored on all of the validation
text. Runs are in order of importance; those whose result is in WORK/results.jsonl are not repeated, so that the command
can be interrupted, or limited by --minutes, and started again. Losses do not depend on the machine's load, so that
--jobs can be trained side by side. Prints each run, the fitted constants, residuals, and the error on held-out runs,
which are larger than all others. --write puts results and constants into the package.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import multiprocessing
import shutil
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import gptmill
from gptmill.data.sources.named_corpora import find_stdlib
from gptmill.data.tokenizers.bpe_training import train_tokenizer
from gptmill.evals.text_loss import count_bytes
from gptmill.experiments.budget.choice import BATCHES, CONTEXTS, MAX_MICRO_BATCH, choose_batch
from gptmill.experiments.budget.corpus_sample import measure_difficulty
from gptmill.experiments.budget.family import FAMILY, Shape
from gptmill.experiments.budget.law_fit import MeasuredRun, fit_law, list_errors
from gptmill.experiments.budget.learning_rates import choose_rates
from gptmill.experiments.budget.scaling_law import ScalingLaw
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone

TRAIN_CHARS = {"books": 12_000_000, "python": 4_000_000}
PIECES, PIECE_CHARS = 10, 6_000  # of the validation text, spread over all of it
TOKENIZER_BYTES = 2_000_000
LAW_FILE = Path(gptmill.__file__).parent / "experiments" / "budget" / "law.json"
TINY, SMALL, MEDIUM, LARGE = Shape(2, 64), Shape(3, 96), Shape(4, 128), Shape(6, 192)
LARGER, WIDE, WIDER, GPT2 = Shape(8, 256), Shape(8, 384), Shape(8, 512), Shape(12, 768)
M = 1_000_000


@dataclass(frozen=True)
class Cell:
    """One run of the grid; the factors multiply what a budget would choose."""

    corpus: str
    vocab_size: int
    """256: bytes."""
    num_layers: int
    embd_size: int
    tokens: int
    dropout: float = 0.0
    matrix_rate: float = 1.0
    embedding_rate: float = 1.0
    batch: float = 1.0
    optimizer: str = "muon"
    held_out: bool = False
    """Not fitted: the law has to predict it."""

    @property
    def name(self) -> str:
        size = f"{self.corpus}-{self.vocab_size}-{self.num_layers}x{self.embd_size}-{self.tokens // 1000}k"
        rates = f"b{self.batch:g}-m{self.matrix_rate:g}-e{self.embedding_rate:g}-{self.optimizer}"
        return f"{size}-d{self.dropout:g}-{rates}"

    @property
    def shape(self) -> Shape:
        return Shape(self.num_layers, self.embd_size)

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * (self.shape.block_weights + self.vocab_size * self.embd_size)

    @property
    def is_usual(self) -> bool:
        """Whether it has the rates and batch of a budget; the law is fitted on these, the others are sweeps."""
        return self.matrix_rate == self.embedding_rate == self.batch == 1.0 and self.optimizer == "muon"


def make_cells() -> list[Cell]:
    """The grid, the most useful runs first."""

    def make(shape: Shape, tokens: float, corpus: str = "books", vocab_size: int = 1024, **more: Any) -> Cell:
        return Cell(corpus, vocab_size, shape.num_layers, shape.embd_size, round(tokens), **more)

    small = [make(*each) for each in product((TINY, SMALL, MEDIUM), (M / 10, 0.3 * M, M))]
    large = [make(*each) for each in product((LARGE, LARGER, WIDE, WIDER), (M, 3 * M, 10 * M))]
    longest = [make(shape, 30 * M) for shape in (MEDIUM, LARGE, LARGER, WIDE)]
    held_out = [
        make(WIDER, 30 * M, held_out=True),
        make(GPT2, 10 * M, held_out=True),
        make(GPT2, 30 * M, held_out=True),
    ]
    vocabularies = [
        make(shape, tokens, vocab_size=vocab_size)
        for shape, tokens in ((SMALL, 0.3 * M), (LARGE, 3 * M), (WIDE, 10 * M))
        for vocab_size in (256, 4096, 8192)
    ]
    plays = [
        make(shape, epochs * 0.4 * M, "shakespeare", dropout=dropout)
        for epochs, dropouts in ((16, (0.1, 0.2)), (64, (0.2, 0.4)), (4, (0.0, 0.1)), (1, (0.0,)), (16, (0.0, 0.4)))
        for shape, dropout in product((MEDIUM, LARGE, LARGER, WIDE), dropouts)
    ]
    code = [
        make(shape, tokens, "python", dropout=dropout)
        for tokens, dropouts in ((M, (0.0,)), (6 * M, (0.0, 0.1)), (24 * M, (0.1, 0.2)))
        for shape, dropout in product((MEDIUM, LARGE, LARGER, WIDE), dropouts)
    ]
    sweeps = [
        make(shape, tokens, **{what: factor})
        for what, factors in (("embedding_rate", (0.5, 2.0)), ("matrix_rate", (0.5, 2.0)), ("batch", (0.5, 2.0, 4.0)))
        for (shape, tokens), factor in product(((MEDIUM, M), (LARGER, 10 * M)), factors)
    ]
    adamw = [make(shape, tokens, optimizer="adamw") for shape, tokens in ((MEDIUM, M), (LARGER, 10 * M))]
    first = [cell for trio in zip(large, plays, plays[len(large) :], strict=False) for cell in trio]
    rest = [*small, *vocabularies, *sweeps, *code, *longest, *plays[2 * len(large) :], *held_out, *adamw]
    return list(dict.fromkeys([*first, *rest]))


def write_texts(options: argparse.Namespace, work: Path) -> None:
    """Writes the training and the validation text of each corpus."""
    if (work / "python.txt").exists():
        return
    with lzma.open(options.books, "rt", encoding="utf-8") as file:
        books = file.read(TRAIN_CHARS["books"])
    with lzma.open(options.books_val, "rt", encoding="utf-8") as file:
        held_out = file.read()
    plays = Path(options.shakespeare).read_text(encoding="utf-8")
    code = read_python()
    texts = {
        "books": (books, spread(held_out)),
        "shakespeare": (plays[: len(plays) * 9 // 10], spread(plays[len(plays) * 9 // 10 :])),
        "python": (code[: len(code) * 19 // 20], spread(code[len(code) * 19 // 20 :])),
    }
    for name, (train, val) in texts.items():
        (work / f"{name}_val.txt").write_text(val, encoding="utf-8")
        (work / f"{name}.txt").write_text(train, encoding="utf-8")


def read_python() -> str:
    """Python's standard library, in an order that mixes its packages."""
    paths = sorted((path for path, _ in find_stdlib()), key=lambda path: hash_name(path.name))
    texts = (Path(path).read_text(encoding="utf-8", errors="replace") for path in paths)
    return "\n".join(texts)[: TRAIN_CHARS["python"]]


def hash_name(name: str) -> int:
    return sum(ord(char) * 31**place for place, char in enumerate(name)) % 1_000_003


def spread(text: str) -> str:
    """Pieces from all over the text."""
    starts = [number * (len(text) - PIECE_CHARS) // (PIECES - 1) for number in range(PIECES)]
    return "".join(text[start : start + PIECE_CHARS] for start in starts)


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
    context = next(size for most, size in CONTEXTS if cell.shape.block_weights <= most)
    wanted = cell.batch * choose_batch(cell.tokens)
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
        progress=False, **{**FAMILY, **cell.shape.list_values(), "optimizer": cell.optimizer, **rates},
    )  # fmt: skip
    losses = [event.val_loss for event in read_events(run.directory.events) if isinstance(event, EvalDone)]
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    return {
        "name": cell.name,
        **asdict(cell),
        "steps": steps,
        "tokens_per_step": tokens_per_step,
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
    write_texts(options, work)
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


def list_measured(results: list[dict[str, Any]], work: Path) -> list[dict[str, Any]]:
    """The runs as the law sees them: of those that differ in dropout alone, the best; sweeps are left out."""
    names = {each["corpus"] for each in results}
    difficulties = {name: measure_difficulty((work / f"{name}.txt").read_text(encoding="utf-8")) for name in names}
    best: dict[str, dict[str, Any]] = {}
    for result in results:
        cell = Cell(**{name: result[name] for name in Cell.__dataclass_fields__})
        group = cell.name.partition("-d")[0]
        if cell.is_usual and result["bits_per_byte"] < best.get(group, {"bits_per_byte": math.inf})["bits_per_byte"]:
            best[group] = result
    measured = []
    for result in best.values():
        size = result["bytes_per_token"]
        run = MeasuredRun(
            Shape(result["num_layers"], result["embd_size"]).block_weights,
            result["steps"] * result["tokens_per_step"] * size, result["epoch_tokens"] * size, result["vocab_size"],
            difficulties[result["corpus"]], result["bits_per_byte"],
        )  # fmt: skip
        measured.append({"name": result["name"], "is_fitted": not result["held_out"], "measured": asdict(run)})
    return measured


def print_fit(measured: list[dict[str, Any]]) -> ScalingLaw:
    """Fits the law and prints it with its errors on fitted and on held-out runs."""
    runs = {kind: [each for each in measured if each["is_fitted"] is kind] for kind in (True, False)}
    law = fit_law([MeasuredRun(**each["measured"]) for each in runs[True]])
    print(f"\n{law}\n\n| run | bits per byte | predicted | error |\n|---|---:|---:|---:|")
    for kind, label in ((True, "fitted"), (False, "held out")):
        found = [MeasuredRun(**each["measured"]) for each in runs[kind]]
        errors = list_errors(law, found)
        for each, run, error in zip(runs[kind], found, errors, strict=True):
            predicted = run.bits_per_byte / math.exp(error)
            print(f"| {each['name']} ({label}) | {run.bits_per_byte:.4f} | {predicted:.4f} | {error:+.2%} |")
        if errors:
            print(f"| mean absolute error of {len(errors)} runs ({label}) | | | {fmean(map(abs, errors)):.2%} |")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", help="books_train.txt.xz")
    parser.add_argument("--books_val", help="books_val.txt.xz")
    parser.add_argument("--shakespeare", help="input.txt")
    parser.add_argument("--work", default="runs/scaling", help="folder for texts, shards, runs and results")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, with one thread each")
    parser.add_argument("--max_flops", type=float, default=math.inf, help="leave out larger runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--fit_only", action="store_true", help="train nothing, fit the results so far")
    parser.add_argument("--write", action="store_true", help="write the fit into the package")
    options = parser.parse_args()
    work = Path(options.work)
    if not options.fit_only:
        if missing := [name for name in ("books", "books_val", "shakespeare") if getattr(options, name) is None]:
            parser.error(f"the grid needs {', '.join(f'--{name}' for name in missing)}")
        work.mkdir(parents=True, exist_ok=True)
        run_grid(options, work)
    results = list(read_results(work).values())
    if not results:
        parser.error(f"{work} has no results yet; leave out --fit_only")
    measured = list_measured(results, work)
    law = print_fit(measured)
    print_sweeps(results)
    if options.write:
        content = {"law": asdict(law), "runs": measured, "results": results}
        LAW_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {LAW_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
