"""What a report says about one run: its facts in sentences, tables and plots."""

from __future__ import annotations

from gptmill.runs.changed_options import find_changed, list_defaults
from gptmill.runs.reporting.document import Block, Document, Folded, KeyFigures, Paragraph, Quote, Section, Table
from gptmill.runs.reporting.facts import RunFacts
from gptmill.runs.reporting.formatting import (
    NOT_RECORDED,
    format_amount,
    format_change,
    format_date,
    format_duration,
    format_loss,
    format_number,
    format_percent,
    format_perplexity,
)
from gptmill.runs.reporting.learning import LossChange
from gptmill.runs.reporting.money import describe_cost, make_cost_figure
from gptmill.runs.reporting.phase_table import PHASE_COLUMNS, list_phase_rows
from gptmill.runs.reporting.plots import plot_loss, plot_metrics

STATES = {
    "running": "still running",
    "finished": "finished",
    "stopped": "stopped before its last step",
    "crashed": "crashed",
    "diverged": "given up as diverged",
    "not started": "not started",
    "model only": "not trained here",
}
NAMED_OPTIONS = ("run_name", "logdir")  # say nothing about the run
MAX_OTHER_SAMPLES = 16


def describe_run(facts: RunFacts, *, is_log: bool = False) -> Document:
    """Returns the report of one run."""
    record = facts.record
    sections = [
        Section("Loss", [*plot_loss(facts, is_log=is_log), *_describe_learning(facts), *_describe_scores(facts)]),
        Section("Phases", _describe_phases(facts)),
        Section("Timeline", _describe_timeline(facts)),
        Section("Speed, and what bounds it", [*map(Paragraph, facts.explanations)]),
        Section("Curves", [*plot_metrics(facts)]),
        Section("What the model wrote", _describe_samples(facts)),
        Section("Incidents", _describe_incidents(facts)),
        Section("Cost and energy", describe_cost(facts)),
        Section("Configuration", _describe_config(facts)),
        Section("Parameters", _describe_parts(facts)),
        Section("Environment", _describe_environment(facts)),
    ]
    return Document(
        record.name,
        make_subtitle(facts),
        [Paragraph(summarize(facts)), KeyFigures(_list_figures(facts))],
        [section for section in sections if section.blocks],
        footer="Written by gptmill report from the run's events.jsonl.",
    )


def make_subtitle(facts: RunFacts) -> str:
    started = f"started {format_date(facts.record.starts[0].time)}" if facts.record.starts else ""
    start, step = facts.start, facts.record.last_step
    progress = f"step {step:,}" + (f" of {start.max_steps:,}" if start else "")
    return ", ".join(part for part in (STATES[facts.state], progress, started) if part)


def summarize(facts: RunFacts) -> str:
    """Returns the run in three sentences."""
    start, record, learning = facts.start, facts.record, facts.learning
    sentences = []
    if start is not None:
        model = f"A model of {format_amount(start.parameters)} parameters"
        trained = f"{format_amount(record.tokens)} tokens of {start.corpus}"
        devices = start.device if start.ranks == 1 else f"{start.ranks:,} ranks on {start.device}"
        running = format_duration(facts.goodput.running_seconds)
        sentences.append(f"{model} was trained on {trained} in {running} ({devices}).")
    if learning is not None:
        first, last = learning.initial, learning.final
        change = "fell" if last.loss < first.loss else "rose"
        sentences.append(
            f"The {learning.kind} loss {change} from {format_loss(first.loss)} to {format_loss(last.loss)} "
            f"({format_change(-learning.improvement)}): the model now hesitates between "
            f"{format_perplexity(last.perplexity)} tokens as if they were equally likely, at first between "
            f"{format_perplexity(first.perplexity)}."
        )
    if facts.state == "running":
        sentences.append("The run goes on; this is its state so far.")
    return " ".join(sentences) or "Nothing was logged yet."


def _list_figures(facts: RunFacts) -> list[tuple[str, str, str]]:
    figures, learning, speed = [], facts.learning, facts.speed
    if learning is not None:
        best = "the best one" if learning.best == learning.final else f"best {format_loss(learning.best.loss)}"
        figures.append((format_loss(learning.final.loss), f"final {learning.kind} loss", best))
        perplexity = format_perplexity(learning.final.perplexity)
        figures.append((perplexity, "perplexity", "effective choices per token"))
    figures.append((format_amount(facts.record.tokens), "tokens", _describe_ratio(facts)))
    processes = len(facts.record.starts)
    wall = f"in {processes} processes" if processes > 1 else "with a process running"
    figures.append((format_duration(facts.goodput.running_seconds), "training time", wall))
    if speed.tokens_per_second is not None:
        mfu = f"MFU {format_percent(speed.mfu)}" if speed.mfu is not None else "median of the steps"
        if speed.samples_per_second is not None:
            mfu += f", {format_number(speed.samples_per_second)} samples/s"
        figures.append((format_amount(speed.tokens_per_second), "tokens per second", mfu))
    if (cost := make_cost_figure(facts)) is not None:
        figures.append(cost)
    return figures


def _describe_ratio(facts: RunFacts) -> str:
    start = facts.start
    return f"{facts.record.tokens / start.parameters:.2g} per parameter" if start and start.parameters else ""


def _describe_learning(facts: RunFacts) -> list[Block]:
    learning = facts.learning
    if learning is None:
        return [Paragraph("Fewer than two losses were logged, so there is no improvement to state.")]
    rows = [_make_loss_row(change) for change in facts.losses]
    texts = []
    if learning.most is not None and learning.initial.step != learning.most.step:
        texts.append(
            f"90 % of the gain was reached by step {learning.most.step:,}, after "
            f"{format_duration(learning.most.elapsed_seconds)}."
        )
    if learning.best != learning.final:
        texts.append(f"The best loss, {format_loss(learning.best.loss)}, was that of step {learning.best.step:,}.")
    if learning.not_finite:
        texts.append(f"{learning.not_finite:,} losses were not finite, and are left out.")
    table = Table(["loss", "first", "last", "change", "best", "perplexity, first", "last"], rows)
    return [table, *([Paragraph(" ".join(texts))] if texts else [])]


def _make_loss_row(change: LossChange) -> list[str]:
    first, last = change.first, change.last
    losses = [format_loss(first.loss), format_loss(last.loss), format_change(-change.improvement)]
    perplexities = [format_perplexity(first.perplexity), format_perplexity(last.perplexity)]
    return [change.kind, *losses, f"{format_loss(change.best.loss)} (step {change.best.step:,})", *perplexities]


def _describe_scores(facts: RunFacts) -> list[Block]:
    rows = [[name, format_number(score), f"{step:,}"] for name, (step, score) in facts.record.scores.items()]
    return [Table(["evaluation", "score", "at step"], rows)] if rows else []


def _describe_phases(facts: RunFacts) -> list[Block]:
    rows = list_phase_rows(facts.phases)
    return [Table([*PHASE_COLUMNS], rows)] if rows else []


def _describe_timeline(facts: RunFacts) -> list[Block]:
    rows = [
        [
            f"{row.point.step:,}",
            format_loss(row.point.loss),
            format_perplexity(row.point.perplexity),
            format_duration(row.point.elapsed_seconds),
            (row.checkpoint or "–") + (" (best)" if row.is_best else ""),
        ]
        for row in facts.timeline
    ]
    best = frozenset(number for number, row in enumerate(facts.timeline) if row.is_best)
    columns = ["step", "validation loss", "perplexity", "elapsed", "checkpoint"]
    blocks: list[Block] = [Table(columns, rows, frozenset({4}), best)] if rows else []
    if rows and facts.goodput.lost_steps:
        blocks.append(Paragraph("The elapsed time leaves out steps that were lost, and the time between processes."))
    return blocks


def _describe_samples(facts: RunFacts) -> list[Block]:
    titles = {1: ["At the end"], 2: ["At the start", "At the end"], 3: ["At the start", "In the middle", "At the end"]}
    samples = facts.samples
    blocks: list[Block] = [
        Quote(f"{title}, step {sample.step:,}", sample.prompt, sample.text)
        for title, sample in zip(titles.get(len(samples), []), samples, strict=True)
    ]
    if samples and samples[-1].more_texts:
        last = samples[-1]
        others = list(last.texts.items())[1 : 1 + MAX_OTHER_SAMPLES]
        quotes: list[Block] = [Quote(f"{name}, step {last.step:,}", last.prompt, text) for name, text in others]
        blocks.append(Folded(f"{len(others):,} more samples of step {last.step:,}", quotes))
    return blocks


def _describe_incidents(facts: RunFacts) -> list[Block]:
    if not facts.incidents:
        return [Paragraph("None: no crash, no rollback, no skipped update and no warning.")]
    rows = [[f"{item.step:,}", format_date(item.time), item.text] for item in facts.incidents]
    blocks: list[Block] = [Table(["step", "time", "what happened"], rows, frozenset({1, 2}))]
    if facts.more_incidents:
        blocks.append(Paragraph(f"{facts.more_incidents:,} more are in the run's history."))
    return blocks


def _describe_config(facts: RunFacts) -> list[Block]:
    """What differs from the defaults first; the rest folded."""
    config = facts.start.config if facts.start else {}
    if not config:
        return [Paragraph(f"The options were {NOT_RECORDED}: an older gptmill trained this run.")]
    shown = {name: value for name, value in config.items() if name not in NAMED_OPTIONS}
    changed, defaults = find_changed(shown), list_defaults()
    rows = [[name, value, defaults.get(name, "–")] for name, value in changed.items()]
    rest = [[name, value] for name, value in shown.items() if name not in changed]
    words = frozenset({0, 1, 2})
    blocks: list[Block] = [Table(["option", "value", "default"], rows, words)] if rows else []
    title = f"{len(rest):,} options with their default values"
    return [*blocks, Folded(title, [Table(["option", "value"], rest, words)])] if rest else blocks


def _describe_parts(facts: RunFacts) -> list[Block]:
    start = facts.start
    if start is None:
        return []
    total = max(1, start.parameters)
    rows = [
        [name.replace("_", " "), f"{number:,.0f}", format_percent(number / total)]
        for name, number in start.parts.items()
    ]
    if not rows:
        return [Paragraph(f"{start.parameters:,} in all; how many each part has was {NOT_RECORDED}.")]
    rows.append(["all", f"{start.parameters:,}", ""])
    return [Table(["part", "parameters", "share"], rows, strong_rows=frozenset({len(rows) - 1}))]


def _describe_environment(facts: RunFacts) -> list[Block]:
    start = facts.start
    if start is None:
        return []
    memory = f"{facts.record.memory_gb:.2f} GB" if facts.record.memory_gb else NOT_RECORDED
    rows = {
        "device": start.device,
        "ranks": f"{start.ranks:,}",
        "precision": start.precision,
        "peak memory": memory,
        "corpus": start.corpus,
        "checksum of the corpus": start.data[:16] or NOT_RECORDED,
        "tokenizer": start.tokenizer,
        "optimizer": start.optimizer or NOT_RECORDED,
        "gptmill": f"{start.version}, code {start.code or NOT_RECORDED}",
        "torch": start.torch_version,
        "started from": start.parent or "scratch",
    }
    return [Table(["what", "value"], [[name, value] for name, value in rows.items()], frozenset({0, 1}))]
