"""Writes what a planned budget trains from: tokenizer, shards and a recipe that gptmill train takes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from gptmill.config.durations import format_duration
from gptmill.config.requests import PrepareRequest, ReadingOptions
from gptmill.config.serialization import make_extension
from gptmill.data.files import write_durably
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import open_shards
from gptmill.data.sources import make_source_name, resolve_source
from gptmill.evals.text_loss import count_bytes
from gptmill.experiments.budget.candidate import EVAL_SHARE, choose_val_fraction
from gptmill.experiments.budget.choice import FORWARD_SHARE, MIN_STEPS
from gptmill.experiments.budget.excerpt import SEPARATOR, read_excerpt, read_few_documents
from gptmill.experiments.budget.planning import END_SECONDS, START_SECONDS, BudgetPlan

DATA_FOLDER = Path("data")


@dataclass(frozen=True)
class BudgetFiles:
    """The recipe, and what the validation loss has to be divided by."""

    recipe: Path
    data_dir: Path
    bytes_per_token: float
    """Of the validation split."""

    def to_bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) / self.bytes_per_token


def write_files(plan: BudgetPlan, report: Report) -> BudgetFiles:
    """Prepares the corpus, or as much of it as the run reads, and writes the recipe with the steps that still fit."""
    stem = claim_stem(f"{make_source_name([plan.corpus])}-{format_duration(plan.seconds)}")
    folder = DATA_FOLDER / stem
    tokenizer = plan.tokenizer.option.name
    if plan.tokenizer.make_definition is not None:
        path = folder.with_suffix(".json")
        write_durably(path, plan.tokenizer.make_definition())
        tokenizer = str(path)
    corpus, reading, text = plan.corpus, ReadingOptions(), read_pieces(plan)
    if text is not None:
        pieces = folder.with_suffix(".txt")
        write_durably(pieces, text)
        corpus, reading = str(pieces), ReadingOptions(separator=SEPARATOR)
    request = PrepareRequest(
        out=str(folder),
        tokenizer=tokenizer,
        val_fraction=choose_val_fraction(plan.needed_bytes),
        split="auto" if text is None else "tail",
        reading=reading,
    )
    prepare_corpus([corpus], request, report)
    shards = open_shards(str(folder))
    tokens = [int(stream.size) for stream in shards.val]
    size = sum(count_bytes(shards.tokenizer, stream) for stream in shards.val)
    values = {**plan.values, "data_dir": str(folder), "tokenizer": tokenizer, "max_steps": count_steps(plan)}
    recipe = Path(f"{stem}.toml")
    write_durably(recipe, make_extension(recipe, None, values, set(values), _make_title(plan)))
    return BudgetFiles(recipe, folder, size / max(1, sum(tokens)))


def read_pieces(plan: BudgetPlan) -> str | None:
    """As much of the corpus as the run reads, in pieces; None if it is all of the corpus, and in documents already."""
    source = resolve_source([plan.corpus], ReadingOptions())
    if plan.needed_bytes < plan.situation.corpus.text_bytes:
        return read_excerpt(source, plan.needed_bytes)[0]
    return read_few_documents(source)


def count_steps(plan: BudgetPlan) -> int:
    """The steps that fit into the time that is left now; a number that the user has set stays."""
    if fixed := plan.situation.given.get("max_steps"):
        return int(fixed)
    left = plan.started + plan.seconds - time.monotonic() - START_SECONDS - END_SECONDS
    steps = left / plan.best.step_seconds / (1 + 2 * EVAL_SHARE * FORWARD_SHARE)
    most = 2 * plan.best.steps if plan.best.share == 1 else plan.best.steps
    return max(MIN_STEPS, min(round(steps), most))


def claim_stem(wanted: str) -> str:
    """A name that no files have yet, with a number if need be; its data folder is made, so that no other takes it."""
    DATA_FOLDER.mkdir(exist_ok=True)
    stems = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return next(stem for stem in stems if _is_free(stem) and _make_folder(DATA_FOLDER / stem))


def _is_free(stem: str) -> bool:
    taken = (Path(f"{stem}.toml"), *(DATA_FOLDER / f"{stem}{suffix}" for suffix in (".json", ".txt", ".partial")))
    return not any(path.exists() for path in taken)


def _make_folder(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _make_title(plan: BudgetPlan) -> str:
    best = plan.best
    return (
        f"Chosen for {plan.corpus} in {format_duration(plan.seconds)} on {plan.device}: "
        f"{best.bits_per_byte:.3f} bits per byte expected"
    )
