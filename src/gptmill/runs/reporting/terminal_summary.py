"""The summary of a run in a few lines: losses and perplexities, tokens, speed, time, and the run by phase."""

from __future__ import annotations

from gptmill.runs.display import make_plain
from gptmill.runs.reporting.facts import RunFacts
from gptmill.runs.reporting.formatting import (
    format_change,
    format_duration,
    format_loss,
    format_number,
    format_percent,
    format_perplexity,
)
from gptmill.runs.reporting.learning import LossChange
from gptmill.runs.reporting.phase_table import PHASE_COLUMNS, list_phase_rows

TITLE_WIDTH = 72
LOSS_COLUMNS = ("loss", "first", "last", "change", "best", "perplexity")
MIN_SHARE = 0.005


def describe_summary(facts: RunFacts) -> str:
    """Returns the tables and lines of the summary; empty if nothing was logged."""
    parts = [*_list_losses(facts), *_list_totals(facts)]
    if not parts:
        return ""
    phases = _list_phases(facts)
    return make_title("summary") + "\n".join([*parts, *([""] if phases else []), *phases])


def make_title(text: str) -> str:
    return f"── {text} ".ljust(TITLE_WIDTH, "─") + "\n"


def format_columns(columns: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """Returns a table whose first column holds words and the others numbers."""
    table = [list(columns), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(width) if not number else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _list_losses(facts: RunFacts) -> list[str]:
    rows = [_make_row(change) for change in facts.losses]
    last = facts.record.last_evaluation
    if last is not None:
        others = {f"  of {make_plain(name)}": loss for name, loss in last.by_corpus.items()}
        if last.ema_loss is not None:
            others["  of the EMA weights"] = last.ema_loss
        rows += [[name, "", format_loss(loss), "", "", ""] for name, loss in others.items()]
    return format_columns(LOSS_COLUMNS, rows) if rows else []


def _make_row(change: LossChange) -> list[str]:
    first, last = change.first, change.last
    if first == last:
        return [change.kind, "", format_loss(last.loss), "", "", format_perplexity(last.perplexity)]
    perplexity = f"{format_perplexity(first.perplexity)} → {format_perplexity(last.perplexity)}"
    best = f"{format_loss(change.best.loss)} at step {change.best.step:,}"
    losses = [format_loss(first.loss), format_loss(last.loss), format_change(-change.improvement), best]
    return [change.kind, *losses, perplexity]


def _list_totals(facts: RunFacts) -> list[str]:
    record, speed = facts.record, facts.speed
    if not record.logged_steps:
        return []
    steps = f"{record.tokens:,.0f} in {record.last_step:,} steps"
    rates = [
        f"{format_number(speed.mean_tokens_per_second)} tokens/s" if speed.mean_tokens_per_second else "",
        f"{format_number(speed.samples_per_second)} samples/s" if speed.samples_per_second else "",
        f"{format_number(1 / speed.step_seconds)} steps/s" if speed.step_seconds else "",
        f"{format_number(1000 * speed.step_seconds)} ms per step" if speed.step_seconds else "",
        f"MFU {format_percent(speed.mfu)}" if speed.mfu is not None else "",
        f"GPU {format_percent(speed.gpu_utilization)} busy" if speed.gpu_utilization is not None else "",
    ]
    rows = {"tokens": steps, "mean speed": ", ".join(filter(None, rates)), "training time": _describe_time(facts)}
    return ["", *(f"{name:<15}{text}" for name, text in rows.items() if text)]


def _describe_time(facts: RunFacts) -> str:
    speed, goodput = facts.speed, facts.goodput
    if not goodput.running_seconds:
        return ""
    shares = {
        "steps": speed.step_share,
        "evaluations": speed.evaluation_share,
        "checkpoints": speed.checkpoint_share,
        "other": speed.other_share,
    }
    listed = ", ".join(f"{name} {format_percent(share)}" for name, share in shares.items() if share >= MIN_SHARE)
    processes = f" in {goodput.restarts + 1} processes" if goodput.restarts else ""
    return f"{format_duration(goodput.running_seconds)}{processes} ({listed})"


def _list_phases(facts: RunFacts) -> list[str]:
    rows = [[make_plain(cell) for cell in row] for row in list_phase_rows(facts.phases)]
    return format_columns(PHASE_COLUMNS, rows) if rows else []
