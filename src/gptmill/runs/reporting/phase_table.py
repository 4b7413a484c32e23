"""The phases of a run as a table, for the report and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from gptmill.runs.reporting.formatting import format_amount, format_duration, format_loss
from gptmill.runs.reporting.phases import Phase

PHASE_COLUMNS = ("phase", "steps", "learning rate", "training loss", "validation", "tokens/s", "time")


def list_phase_rows(phases: Iterable[Phase]) -> list[list[str]]:
    """One row for each phase."""
    rows = []
    for phase in phases:
        train = " → ".join(map(format_loss, phase.train_loss)) if phase.train_loss else "–"
        rates = " → ".join(f"{rate:.2g}" for rate in phase.lr_range)
        speed = format_amount(phase.tokens_per_second) if phase.tokens_per_second is not None else "–"
        steps = f"{phase.first_step:,}–{phase.last_step:,}"
        validation = format_loss(phase.val_loss)
        rows.append([phase.name, steps, rates, train, validation, speed, format_duration(phase.seconds)])
    return rows
