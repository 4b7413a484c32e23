"""export_model: a trained model written for other software, as a function call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gptmill.api.configuration import Recipe
from gptmill.api.run import Run
from gptmill.config.export_request import ExportRequest
from gptmill.config.keywords import build_request
from gptmill.config.run import ExportFormat
from gptmill.inference.export.exporting import export


def export_model(
    source: Run | Recipe,
    to: ExportFormat = "hf",
    *,
    dtype: str | None = None,
    out: Recipe | None = None,
    **options: Any,
) -> Path:
    """Exports a run, a checkpoint or a Hugging Face folder, and returns the path of what it wrote.

    The options are those of gptmill export.
    """
    given = {"to": to, "dtype": dtype, "out": out, **options}
    request = build_request(ExportRequest, {name: value for name, value in given.items() if value is not None})
    return export(os.fspath(source.path if isinstance(source, Run) else source), request, lambda _stage: None).path
