"""Options of gptmill tensorboard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorBoardRequest:
    """TensorBoard"""

    logdir: str = "runs"
    """Folder that contains all runs."""
    port: int | None = None
    """Port to serve on (default: the first free one from 6006 on)."""
    host: str = "127.0.0.1"
    """Address to serve on; 0.0.0.0 serves other machines too."""
