"""Options of gptmill report. The rules are RunConfig's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReportFormat = Literal["html", "md", "json"]
PlotAxes = Literal["linear", "log"]


@dataclass(frozen=True)
class ReportRequest:
    """Report"""

    format: ReportFormat = "html"
    """html: one page with plots; md: Markdown; json: all numbers."""
    out: str | None = None
    """Output file; - for standard output (default: html to RUN/report.html; md and json to standard output)."""
    price_per_hour: float | None = None
    """Price of one device per hour in dollars (default: a typical price of the GPU)."""
    axes: PlotAxes = "linear"
    """Axes of the loss plot; log: steps and losses on logarithmic axes."""
    logdir: str = "runs"
    """Folder that contains all runs."""
