"""Trains a grid of small models and fits the scaling law that `--budget` predicts losses with.

    python benchmarks/scaling.py --books books_train.txt.xz --books_val books_val.txt.xz --shakespeare input.txt \
        --work runs/scaling [--minutes 60] [--fit_only] [--write]

Runs are in order of importance; those whose result is in WORK/results.jsonl are not repeated, so that the command
can be interrupted, or limited by --minutes, and started again. Losses do not depend on the machine's load. Prints each
run, the fitted constants, residuals, and the error on held-out runs, which are larger than all others. --write puts
results and constants into the package.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import gptmill
from gptmill.data.sources.named_corpora import find_stdlib
from gptmill.data.tokenizers.bpe_training import train_tokenizer
from gptmill.evals.text_loss import count_bytes
from gptmill.experiments.budget.corpus_sample import measure_difficulty
from gptmill.experiments.budget.family import FAMILY, Shape
from gptmill.experiments.budget.law_fit import MeasuredRun, fit_law, list_errors
from gptmill.experiments.budget.scaling_law import ScalingLaw
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone

TRAIN_CHARS = 4_000_000
PIECES, PIECE_CHARS = 10, 6_000  # of the validation text, spread over all of it
TOKENIZER_BYTES = 2_000_000
SWEPT = ("batch", "context", "matrix_lr", "max_lr", "dropout", "optimizer")
LAW_FILE = Path(gptmill.__file__).parent / "experiments" / "budget" / "law.json"
SMALL, MEDIUM, LARGE, LARGEST = Shape(2, 64), Shape(3, 96), Shape(4, 128), Shape(5, 192)


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    corpus: str
    vocab_size: int
    """256: bytes."""
    num_layers: int
    embd_size: int
    tokens: int
    batch: int = 8
    context: int = 128
    matrix_lr: float = 0.02
    max_lr: float = 3e-3
    dropout: float = 0.0
    optimizer: str = "muon"
    held_out: bool = False
    """Not fitted: the law has to predict it."""

    @property
    def name(self) -> str:
        size = f"{self.corpus}-{self.vocab_size}-{self.num_layers}x{self.embd_size}-{self.tokens // 1000}k"
        rates = f"b{self.batch}-c{self.context}-m{self.matrix_lr:g}-a{self.max_lr:g}-d{self.dropout:g}"
        return f"{size}-{rates}-{self.optimizer}"


def make_cells() -> list[Cell]:
    """The grid, the most useful runs first."""

    def make(shape: Shape, tokens: int, corpus: str = "books", vocab_size: int = 1024, **more: Any) -> Cell:
        return Cell(corpus, vocab_size, shape.num_layers, shape.embd_size, tokens, **more)

    few, some, many = 100_000, 250_000, 600_000
    return [
        make(SMALL, few), make(MEDIUM, few), make(SMALL, some), make(LARGE, few), make(MEDIUM, some),
        make(SMALL, few, vocab_size=256), make(MEDIUM, some, vocab_size=256), make(SMALL, few, vocab_size=4096),
        make(SMALL, few, "shakespeare"), make(SMALL, few, "python"), make(SMALL, many),
        make(SMALL, few, matrix_lr=0.01), make(SMALL, few, matrix_lr=0.04), make(SMALL, few, max_lr=6e-3),
        make(SMALL, few, max_lr=0.012), make(SMALL, some, max_lr=6e-3), make(MEDIUM, few, max_lr=6e-3),
        make(MEDIUM, some, "shakespeare"), make(MEDIUM, some, "python"), make(SMALL, some, "excerpt"),
        make(LARGE, few, matrix_lr=0.01), make(LARGE, few, matrix_lr=0.04),
        make(SMALL, few, batch=4), make(SMALL, few, batch=16), make(SMALL, some, vocab_size=256),
        make(MEDIUM, many), make(LARGE, some, held_out=True), make(SMALL, many, "excerpt"),
        make(SMALL, few, optimizer="adamw", max_lr=4e-3), make(LARGE, few, optimizer="adamw", max_lr=2e-3),
        make(SMALL, few, optimizer="adamw", max_lr=8e-3), make(LARGE, few, optimizer="adamw", max_lr=4e-3),
        make(MEDIUM, some, "excerpt"), make(MEDIUM, some, "excerpt", dropout=0.1), make(SMALL, some, vocab_size=512),
        make(LARGE, many, held_out=True), make(MEDIUM, many, "shakespeare", held_out=True),
        make(LARGEST, some), make(LARGE, some, "python", held_out=True), make(MEDIUM, some, vocab_size=4096),
        make(SMALL, 1_500_000), make(MEDIUM, 1_500_000), make(LARGEST, many), make(LARGE, 1_500_000, held_out=True),
    ]  # fmt: skip


def write_texts(options: argparse.Namespace, work: Path) -> None:
    """Writes the training and the validation text of each corpus."""
    if (work / "excerpt.txt").exists():
        return
    with lzma.open(options.books, "rt", encoding="utf-8") as file:
        books = file.read(TRAIN_CHARS)
    with lzma.open(options.books_val, "rt", encoding="utf-8") as file:
        held_out = file.read()
    plays = Path(options.shakespeare).read_text(encoding="utf-8")
    code = read_python()
    texts = {
        "books": (books, spread(held_out)),
        "shakespeare": (plays[: len(plays) * 9 // 10], spread(plays[len(plays) * 9 // 10 :])),
        "python": (code[: len(code) * 19 // 20], spread(code[len(code) * 19 // 20 :])),
        "excerpt": (books[:200_000], spread(held_out)),
    }
    for name, (train, val) in texts.items():
        (work / f"{name}_val.txt").write_text(val, encoding="utf-8")
        (work / f"{name}.txt").write_text(train, encoding="utf-8")


def read_python() -> str:
    """Python's standard library, in an order that mixes its packages."""
    paths = sorted((path for path, _ in find_stdlib()), key=lambda path: hash_name(path.name))
    return "\n".join(Path(path).read_text(encoding="utf-8", errors="replace") for path in paths)[:TRAIN_CHARS]


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
    shards = gptmill.prepare(text, val_source=val, tokenizer=tokenizer, out=folder, progress=False)
    tokens = shards.tokens("val")[0]
    return folder, count_bytes(shards.tokenizer, tokens) / len(tokens), shards.info.train.tokens


def train(cell: Cell, work: Path) -> dict[str, Any]:
    """Trains a cell; returns its result."""
    folder, bytes_per_token, epoch_tokens = prepare(work, cell.corpus, cell.vocab_size)
    tokens_per_step = cell.batch * cell.context
    steps = cell.tokens // tokens_per_step
    values = {**FAMILY, **Shape(cell.num_layers, cell.embd_size).list_values(), "matrix_lr": cell.matrix_lr}
    if cell.optimizer != "muon":
        values = {**values, "optimizer": cell.optimizer}
        del values["matrix_lr"]
    started, clock = time.monotonic(), time.process_time()
    run = gptmill.train(
        None, data_dir=str(folder), context_length=cell.context, total_batch_size=tokens_per_step, device="cpu",
        mini_batch_size=cell.batch, max_steps=steps, warmup_steps=max(10, steps // 50), max_lr=cell.max_lr,
        dropout=cell.dropout, shift_windows=True, eval_freq=10**9, eval_tokens=10**9, sample_tokens=0, log_freq=10,
        checkpoint_freq=10**9, keep_checkpoints=1, guard="warn", run_name=cell.name, logdir=str(work / "runs"),
        progress=False, **values,
    )  # fmt: skip
    losses = [event.val_loss for event in read_events(run.directory.events) if isinstance(event, EvalDone)]
    loss = losses[-1]
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    return {
        **asdict(cell),
        "tokens": steps * tokens_per_step,
        "epoch_tokens": epoch_tokens,
        "bytes_per_token": bytes_per_token,
        "loss": loss,
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - clock,
    }


def read_results(work: Path) -> dict[str, dict[str, Any]]:
    """Results so far, by the name of their cell."""
    path = work / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def run_grid(options: argparse.Namespace, work: Path) -> None:
    deadline = time.monotonic() + 60 * options.minutes
    write_texts(options, work)
    for cell in make_cells():
        if cell.name in read_results(work):
            continue
        if time.monotonic() > deadline:
            print("time is up")
            return
        shutil.rmtree(work / "runs" / cell.name, ignore_errors=True)
        result = {"name": cell.name, **train(cell, work)}
        with (work / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{cell.name}: {result['bits_per_byte']:.4f} bits per byte, {result['seconds']:.0f} s", flush=True)


def list_measured(results: list[dict[str, Any]], work: Path) -> list[dict[str, Any]]:
    """The runs at the family's own rates and batch, as the law sees them; other rates and batches are sweeps."""
    texts = {name: (work / f"{name}.txt").read_text(encoding="utf-8") for name in {each["corpus"] for each in results}}
    difficulties = {name: measure_difficulty(texts["books" if name == "excerpt" else name]) for name in texts}
    usual = {name: field.default for name, field in Cell.__dataclass_fields__.items() if name in SWEPT}
    measured = []
    for result in results:
        if any(result[name] != value for name, value in usual.items()):
            continue
        size = result["bytes_per_token"]
        run = MeasuredRun(
            Shape(result["num_layers"], result["embd_size"]).block_weights, result["tokens"] * size,
            result["epoch_tokens"] * size, result["vocab_size"], difficulties[result["corpus"]],
            result["bits_per_byte"],
        )  # fmt: skip
        measured.append({"name": result["name"], "is_fitted": is_fitted(result), "measured": asdict(run)})
    return measured


def is_fitted(result: dict[str, Any]) -> bool:
    """The excerpt is one book, and its validation text is of others: what is missing there is not only more data."""
    return not result["held_out"] and result["corpus"] != "excerpt"


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
    print("\n| sweep | rates, batch, dropout | bits per byte |\n|---|---|---:|")
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(result["name"].partition("-b")[0], []).append(result)
    for name, group in groups.items():
        for result in group if len(group) > 1 else []:
            print(f"| {name} | {result['name'].removeprefix(name + '-')} | {result['bits_per_byte']:.4f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", help="books_train.txt.xz")
    parser.add_argument("--books_val", help="books_val.txt.xz")
    parser.add_argument("--shakespeare", help="input.txt")
    parser.add_argument("--work", default="runs/scaling", help="folder for texts, shards, runs and results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--fit_only", action="store_true", help="train nothing, fit the results so far")
    parser.add_argument("--write", action="store_true", help="write the fit into the package")
    options = parser.parse_args()
    work = Path(options.work)
    if not options.fit_only:
        if missing := [name for name in ("books", "books_val", "shakespeare") if getattr(options, name) is None]:
            parser.error(f"the grid needs {', '.join(f'--{name}' for name in missing)}")
        work.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
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
