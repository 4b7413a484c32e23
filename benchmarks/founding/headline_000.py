"""Founding document 000's run: GPT-2 124M, context 256, 1,610 steps of 8 windows, 79 minutes on an RTX 3500.

    python benchmarks/founding/headline_000.py books.txt.xz [--tokens 777000] [--logdir runs/headline]

The text is one file, in which lines `<|endoftext|>` separate books, or a folder that gptmill prepare made with GPT-2's
tokenizer. Of a text, books are taken until they have as many tokens as 000's, and the last 15 % of each are held out.
The recipe books-000 then runs twice: with all 1,610 steps of 000 and its optimizer, and with Muon, until early stopping
ends it. Times count from the start of the process to its end, checkpoints included; these go to memory (/dev/shm) where
there is room. Exits with 1 if a run fails, or if Muon does not reach 000's validation loss in 30 s or stop early.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from report import TINY_FLAGS, print_heading, print_table, print_verdict
from runs import Run, make_absolute, run_guarded, train

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest, ReadingOptions
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import holds_shards
from gptmill.data.sources import open_documents, resolve_source
from gptmill.data.tokenizers import build_tokenizer

SEPARATOR = r"\n<|endoftext|>\n"
MEMORY = Path("/dev/shm")
NEEDED_BYTES = 16e9
LIMIT_SECONDS, RUN_SECONDS = 30.0, 120.0
LOSS_000 = 4.74
MUON = "--optimizer muon --max_lr 1e-3 --warmup_steps 20 --max_steps 4830".split()
TINY_STEPS = "--max_steps 6 --eval_freq 2 --early_stop_patience 1 --early_stop_min_delta 100".split()
FOUND_000 = ("1,610", "79 min", "79 min", "0.34", "10.99 → 3.35", "10.98 → 4.74", "4.74 (115), flat from step 1,300")
MEASURES = (
    "steps",
    "whole run",
    f"until validation loss {LOSS_000:.2f}",
    "steps/s",
    "training loss",
    "validation loss",
    "lowest validation loss (perplexity)",
)


@dataclass(frozen=True)
class Result:
    """What the events of a run say."""

    steps: int
    seconds: float
    step_seconds: float
    training: tuple[float, float]
    """Loss on training windows at the first and at the last evaluation."""
    validation: tuple[float, float]
    best: tuple[int, float]
    """Step and loss of the best evaluation."""
    seconds_to_loss: float | None
    """Until 000's validation loss; None if that was not reached."""
    is_stopped_early: bool

    def list_cells(self) -> tuple[str, ...]:
        step, loss = self.best
        return (
            f"{self.steps:,}",
            f"{self.seconds:.1f} s",
            "never" if self.seconds_to_loss is None else f"{self.seconds_to_loss:.1f} s",
            f"{1 / self.step_seconds:.1f}",
            "{:.2f} → {:.2f}".format(*self.training),
            "{:.2f} → {:.2f}".format(*self.validation),
            f"{loss:.2f} ({math.exp(loss):.0f}) at step {step:,}",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeats the run of founding document 000.")
    parser.add_argument("text", help="a text, or a folder that gptmill prepare made with GPT-2's tokenizer")
    parser.add_argument("--tokens", type=int, default=777_000, help="tokens of the text to take")
    parser.add_argument("--logdir", help="folder for the runs (default: a temporary one)")
    parser.add_argument("--flags", default="", help="more flags for both runs, in quotes")
    parser.add_argument("--tiny", action="store_true", help="the smallest model on the CPU, to test this script")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(options.logdir).resolve() if options.logdir else open_folder(stack)
        flags = ["--data_dir", find_corpus(options.text, options.tokens, folder)]
        flags += [*(TINY_FLAGS + TINY_STEPS if options.tiny else []), *options.flags.split()]
        print_heading("000: GPT-2 124M on 777 K tokens of books")
        ways = {"all": [*flags, "--early_stop_patience", "none"], "muon": [*MUON, *flags]}
        runs = [train(folder / name, "books-000", words, RUN_SECONDS, None) for name, words in ways.items()]
    return report(runs)


def open_folder(stack: ExitStack) -> Path:
    """A temporary folder in memory where there is room for the checkpoints, else on disk."""
    is_roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > NEEDED_BYTES
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY if is_roomy else None)))


def find_corpus(text: str, tokens: int, folder: Path) -> str:
    """The prepared corpus: as given, or made of the first books of a text, with the tail of each held out."""
    if holds_shards(text):
        return make_absolute(text)
    reading, books = ReadingOptions(separator=SEPARATOR), folder / "books"
    (file,) = resolve_source([text], reading).files
    shutil.rmtree(books, ignore_errors=True)
    books.mkdir(parents=True)
    tokenizer, left = build_tokenizer("gpt2", ()), tokens
    with open_documents(file, reading) as documents:
        for number, document in enumerate(documents):
            ids = tokenizer.encode(document).tolist()[:left]
            cut = tokenizer.decode_bytes(ids).decode("utf-8", "ignore")  # the last token may be a part of a character
            (books / f"{number:03d}.txt").write_text(cut, encoding="utf-8")
            left -= len(ids)
            if not left:
                break
    if left:
        raise UserError(f"{text} has only {tokens - left:,} of {tokens:,} tokens; give more text, or fewer --tokens")
    request = PrepareRequest(
        out=str(folder / "corpus"), tokenizer="gpt2", val_fraction=0.15, split="tail", overwrite=True, processes=1
    )
    return str(prepare_corpus([str(books)], request, lambda _: None)[0])


def read_result(run: Run) -> Result:
    """Reads the figures of a run that has ended."""
    steps, evaluations, (end,) = run.select("StepLogged"), run.select("EvalDone"), run.select("RunFinished")
    losses = [event["train_loss"] for event in run.select("TrainEvalDone")]
    best = min(evaluations, key=lambda event: event["val_loss"])
    reached = (event["time"] - run.started for event in evaluations if event["val_loss"] <= LOSS_000)
    return Result(
        steps=end["step"],
        seconds=end["time"] - run.started,
        step_seconds=statistics.fmean(event["seconds"] for event in steps),
        training=(losses[0], losses[-1]),
        validation=(evaluations[0]["val_loss"], evaluations[-1]["val_loss"]),
        best=(best["step"], best["val_loss"]),
        seconds_to_loss=next(reached, None),
        is_stopped_early="stopped early" in end["reason"],
    )


def report(runs: list[Run | None]) -> int:
    """Prints the table and the verdicts; returns the exit code."""
    found = [read_result(run) for run in runs if run is not None and run.select("RunFinished")]
    if len(found) < len(runs):
        print("a run failed")
        return 1
    whole, early = found
    rows = zip(MEASURES, FOUND_000, whole.list_cells(), early.list_cells(), strict=True)
    print_table(("", "000", "gptmill, 000's optimizer", "gptmill, Muon and early stopping"), list(rows))
    print(
        "000 says 3.4 steps/s: its 1,610 steps in 79 minutes are 0.34. Its text is not known, so that its losses and\n"
        "these are of different books. Both losses are those of 5 batches, as in 000.\n"
    )
    seconds = early.seconds_to_loss
    is_fast = print_verdict(
        f"a validation loss of {LOSS_000:.2f} in less than {LIMIT_SECONDS:.0f} s",
        "never" if seconds is None else f"{seconds:.1f} s",
        is_met=seconds is not None and seconds < LIMIT_SECONDS,
    )
    is_found = print_verdict(
        "early stopping finds the plateau",
        f"stopped at step {early.steps:,}; lowest loss {early.best[1]:.2f} at {early.best[0]:,}",
        is_met=early.is_stopped_early and early.best[1] <= whole.best[1],
    )
    return 0 if is_fast and is_found else 1


if __name__ == "__main__":
    sys.exit(run_guarded(main))
