"""Notebooks and prompts: whether code is typed into this process, and text in a notebook's cell."""

from __future__ import annotations

import sys
import time
from typing import Any

REFRESH_SECONDS = 0.5


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose output is a cell and not a terminal."""
    return type(_find_shell()).__name__ in ("ZMQInteractiveShell", "Shell")  # the latter is Google Colab's


def is_interactive() -> bool:
    """Whether code is typed into this process, which lives on after an interrupt."""
    return _find_shell() is not None or hasattr(sys, "ps1")


class CellText:
    """One output of a notebook's cell, whose text is replaced in place and as often as a reader can follow."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0

    def show(self, text: str, *, at_once: bool = True) -> None:
        """Shows the text; without `at_once`, only if the last one has been there for a while."""
        now = time.monotonic()
        if not at_once and now - self._shown_at < REFRESH_SECONDS:
            return
        self._shown_at = now
        content = {"text/plain": text}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _find_shell() -> object | None:
    """IPython's shell; None without IPython, which is not imported for this."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
