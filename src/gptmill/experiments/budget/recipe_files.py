"""Writes what a planned budget trains from: tokenizer, shards and a recipe that gptmill train takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from gptmill.experiments.budget.candidate import EVAL_FACTOR, TokenizerOption, choose_val_fraction
from gptmill.experiments.budget.choice import MIN_STEPS
from gptmill.experiments.budget.excerpt import SEPARATOR, read_excerpt, read_few_documents
from gptmill.experiments.budget.planning import END_SECONDS, START_SECONDS, BudgetPlan

DATA_FOLDER = Path("data")


@dataclass(frozen=True)
class BudgetData:
    """The text as shards of one tokenizer."""

    folder: Path
    option: TokenizerOption
    tokenizer: str
    """Its name, or the path of its tokenizer.json."""
    bytes_per_token: float
    """Of the validation split."""

    def to_bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) / self.bytes_per_token


@dataclass(frozen=True)
class BudgetFiles:
    """The recipe, and the data that it names."""

    recipe: Path
    data: BudgetData


def write_files(plan: BudgetPlan, report: Report, before: Sequence[BudgetFiles] = ()) -> BudgetFiles:
    """Prepares the corpus, or as much of it as the run reads, and writes the recipe with the steps that still fit.

    `before` are the files of other models for the same budget: a tokenizer is not trained and used twice.
    """
    name = f"{make_source_name([plan.corpus])}-{format_duration(plan.seconds)}"
    wanted = f"{name}-{plan.best.shape.name}" if before else name
    data = next((files.data for files in before if files.data.option == plan.best.tokenizer), None)
    stem = claim_stem(wanted) if data is None else next(list_free_stems(wanted))
    if data is None:
        data = prepare_data(plan, DATA_FOLDER / stem, report)
    steps = count_steps(plan)
    values = {**plan.values, "data_dir": str(data.folder), "tokenizer": data.tokenizer, "max_steps": steps}
    recipe = Path(f"{stem}.toml")
    write_durably(recipe, make_extension(recipe, None, values, set(values), _make_title(plan)))
    return BudgetFiles(recipe, data)


def prepare_data(plan: BudgetPlan, folder: Path, report: Report) -> BudgetData:
    """Writes the tokenizer and the shards."""
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
    tokens = sum(int(stream.size) for stream in shards.val)
    size = sum(count_bytes(shards.tokenizer, stream) for stream in shards.val)
    return BudgetData(folder, plan.best.tokenizer, tokenizer, size / max(1, tokens))


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
    left = plan.find_seconds_left() - START_SECONDS - END_SECONDS
    steps = left / plan.best.step_seconds / EVAL_FACTOR
    most = 2 * plan.best.steps if plan.best.share == 1 else plan.best.steps
    return max(MIN_STEPS, min(round(steps), most))


def claim_stem(wanted: str) -> str:
    """A name that no files have yet, with a number if need be; its data folder is made, so that no other takes it."""
    DATA_FOLDER.mkdir(exist_ok=True)
    return next(stem for stem in list_free_stems(wanted) if _make_folder(DATA_FOLDER / stem))


def list_free_stems(wanted: str) -> Iterator[str]:
    """Names that no files have yet."""
    stems = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return (stem for stem in stems if _is_free(stem))


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
