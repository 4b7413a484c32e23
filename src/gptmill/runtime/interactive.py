"""Whether a person is at the other end: a notebook's kernel, IPython, or Python's own prompt."""

from __future__ import annotations

import sys


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose output is a cell and not a terminal."""
    return type(_find_shell()).__name__ in ("ZMQInteractiveShell", "Shell")  # the latter is Google Colab's


def is_interactive() -> bool:
    """Whether code is typed into this process, which goes on after an interrupt."""
    return _find_shell() is not None or hasattr(sys, "ps1")


def _find_shell() -> object | None:
    """IPython's shell; None without IPython, which is never imported here."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
