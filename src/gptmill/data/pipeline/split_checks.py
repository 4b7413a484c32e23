"""Checks that a corpus has a training split, and a validation split if one was asked for; else says why not."""

from __future__ import annotations

from gptmill.config.errors import UserError
from gptmill.data.pipeline.journal import Journal
from gptmill.data.pipeline.prepare_job import PrepareJob


def check_splits(job: PrepareJob, journal: Journal) -> None:
    """Raises UserError if a split is empty that should not be."""
    name = job.source.name
    if journal.train.tokens + journal.val.tokens == 0:
        raise UserError(_explain_nothing(name, journal))
    after = " after cleaning" if journal.report.dropped else ""
    if job.val_source is not None:
        for source, tokens, option in (
            (job.source, journal.train.tokens, "source"),
            (job.val_source, journal.val.tokens, "--val_source"),
        ):
            if tokens == 0:
                raise UserError(f"there is no text in the {option} {source.name}{after}; give files that contain some")
        return
    if journal.train.tokens == 0:
        raise UserError(
            f"{name} would leave nothing to train on; give more text, a smaller --val_fraction or --split tail"
        )
    if journal.val.tokens == 0 and job.has_val:
        raise UserError(
            f"{name} would leave nothing for validation; give more text, --split tail or --val_source, or "
            f"--val_fraction 0 for no validation split"
        )


def _explain_nothing(name: str, journal: Journal) -> str:
    dropped = journal.report.dropped
    if not dropped:
        return "\n  ".join([f"there is no text in {name}; give files that contain some", *journal.defects.describe()])
    documents = sum(entry.documents for entry in dropped.values())
    findings = dropped["languages"].describe_findings() if "languages" in dropped else ""
    found = f" (languages found: {findings})" if findings else ""
    return f"cleaning dropped all {documents:,} documents of {name}{found}; relax the filters"
