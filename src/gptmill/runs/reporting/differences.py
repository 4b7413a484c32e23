"""What a report says about several runs: overlaid curves, and what differs in their options and results."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from gptmill.runs.reporting.content import STATES, summarize
from gptmill.runs.reporting.document import Block, Document, Legend, Paragraph, Section, Table
from gptmill.runs.reporting.facts import RunFacts
from gptmill.runs.reporting.formatting import (
    NOT_RECORDED,
    format_amount,
    format_dollars,
    format_duration,
    format_loss,
    format_percent,
    format_perplexity,
)
from gptmill.runs.reporting.plots import plot_overlaid
from gptmill.runs.run_comparison import find_differences

ABSENT = "–"


def describe_several(runs: Sequence[RunFacts], *, is_log: bool = False) -> Document:
    """Returns the report of two or more runs."""
    letters = [make_letter(number) for number in range(len(runs))]
    titles = [f"{letter} {facts.record.name}" for letter, facts in zip(letters, runs, strict=True)]
    legend = Legend([(style, letters[style], facts.record.name) for style, facts in enumerate(runs)])
    sections = [
        Section("Loss", [legend, *plot_overlaid(runs, letters, is_log=is_log)]),
        Section("Results", [Table(["", *titles], make_results(runs), strong_rows=frozenset({0}))]),
        Section("Options that differ", _describe_differences(runs, titles)),
        Section("Each run", [_describe_each(title, facts) for title, facts in zip(titles, runs, strict=True)]),
    ]
    names = ", ".join(facts.record.name for facts in runs[:4]) + (", …" if len(runs) > 4 else "")
    return Document(
        names,
        f"{len(runs)} runs compared",
        [Paragraph(_name_best(runs))],
        sections,
        footer="Written by gptmill report from the runs' events.jsonl.",
    )


def _describe_each(title: str, facts: RunFacts) -> Paragraph:
    return Paragraph(f"{title}: {summarize(facts)}")


def make_letter(number: int) -> str:
    """A to Z, then AA, AB, …"""
    rest, last = divmod(number, len(ascii_uppercase))
    return (make_letter(rest - 1) if rest else "") + ascii_uppercase[last]


def make_results(runs: Sequence[RunFacts]) -> list[list[str]]:
    """Returns the rows of the table of results: what it is, and the value of each run."""
    rows = [["final loss"], ["perplexity"], ["best loss"], ["90 % of the gain by step"], ["state"], ["step"]]
    rows += [["parameters"], ["tokens"], ["training time"], ["tokens/s"], ["MFU"], ["cost"], ["device"]]
    for facts in runs:
        learning, start, cost = facts.learning, facts.start, facts.cost
        speed = facts.speed.tokens_per_second
        values = [
            _describe_loss(facts),
            format_perplexity(learning.final.perplexity) if learning else ABSENT,
            format_loss(learning.best.loss) if learning else ABSENT,
            f"{learning.most.step:,}" if learning and learning.most else ABSENT,
            STATES[facts.state],
            f"{facts.record.last_step:,}" + (f" of {start.max_steps:,}" if start else ""),
            f"{start.parameters:,}" if start else ABSENT,
            format_amount(facts.record.tokens),
            format_duration(facts.goodput.running_seconds),
            format_amount(speed) if speed is not None else ABSENT,
            format_percent(facts.speed.mfu) if facts.speed.mfu is not None else ABSENT,
            format_dollars(cost.dollars) if cost.dollars is not None else ABSENT,
            start.device if start else ABSENT,
        ]
        for row, value in zip(rows, values, strict=True):
            row.append(value)
    return [row for row in rows if any(value != ABSENT for value in row[1:])]


def _describe_loss(facts: RunFacts) -> str:
    learning = facts.learning
    if learning is None:
        return ABSENT
    return format_loss(learning.final.loss) + (" (training)" if learning.kind == "training" else "")


def _describe_differences(runs: Sequence[RunFacts], titles: Sequence[str]) -> list[Block]:
    configs = [facts.start.config if facts.start else {} for facts in runs]
    if not all(configs):
        missing = [title for title, config in zip(titles, configs, strict=True) if not config]
        return [Paragraph(f"The options of {', '.join(missing)} were {NOT_RECORDED}.")]
    rows = [
        [name, *(ABSENT if value is None else str(value) for value in values)]
        for name, values in find_differences(configs).items()
    ]
    return [Table(["option", *titles], rows)] if rows else [Paragraph("None: all options are equal.")]


def _name_best(runs: Sequence[RunFacts]) -> str:
    ended = [(facts.learning.best, facts.record.name) for facts in runs if facts.learning is not None]
    if len(ended) < 2:
        return "There are not enough losses to compare."
    ranked = sorted(ended, key=lambda pair: pair[0].loss)
    (best, name), (second, other) = ranked[:2]
    lead = (second.loss - best.loss) / second.loss if second.loss else 0.0
    return (
        f"{name} has the lowest loss, {format_loss(best.loss)} at step {best.step:,}: {format_percent(lead)} below "
        f"{other} with {format_loss(second.loss)}."
    )
