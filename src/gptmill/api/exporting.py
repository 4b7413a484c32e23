"""export_model: a trained model written for other software, as a function call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptmill.api.configuration import Recipe
from gptmill.api.progress import show_amount
from gptmill.api.run import Run
from gptmill.config.export_request import ExportRequest
from gptmill.config.keywords import build_request
from gptmill.config.run import ExportFormat
from gptmill.config.trust import trusting
from gptmill.inference.export.exporting import export
from gptmill.inference.export.passes import Report, stay_silent

MILLION = 10**6


def export_model(
    source: Run | Recipe,
    to: ExportFormat = "hf",
    *,
    dtype: str | None = None,
    out: Recipe | None = None,
    progress: bool = True,
    **options: Any,
) -> Path:
    """Exports a run, a checkpoint or a Hugging Face folder, and returns the path of what it wrote.

    The options are those of gptmill export.
    """
    given = {"to": to, "dtype": dtype, "out": out, **options}
    request = build_request(ExportRequest, {name: value for name, value in given.items() if value is not None})
    path = os.fspath(source.path if isinstance(source, Run) else source)
    with trusting(request.trusting.trust):
        return export(path, request, show_parameters if progress else stay_silent).path


@contextmanager
def show_parameters(stage: str) -> Iterator[Report]:
    """Shows how many parameters a stage of an export is done with, and how long it will still take."""
    with show_amount(stage, "million parameters") as report:
        yield lambda done, total: report(done // MILLION, total // MILLION)
