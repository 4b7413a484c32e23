"""Options of gptmill doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorRequest:
    """Doctor"""

    logdir: str = "runs"
    """Folder in which runs would be written: its disk is measured."""
    quick: bool = False
    """Leave out what takes seconds: torch.compile, matmuls, attention, kernels and handshakes between processes."""
    json: bool = False
    """Print the findings as JSON."""
