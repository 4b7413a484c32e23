"""Notebooks, prompts and terminals: whether code is typed into this process, and what is drawn for who reads it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
from rich.file_proxy import FileProxy
from rich.segment import Segment

from gptmill.config.text import GuardedStream, find_raw, sanitize

REFRESH_SECONDS = 0.5


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose output is a cell and not a terminal."""
    return type(_find_shell()).__name__ in ("ZMQInteractiveShell", "Shell")  # the latter is Google Colab's


def is_interactive() -> bool:
    """Whether code is typed into this process, which lives on after an interrupt."""
    return _find_shell() is not None or hasattr(sys, "ps1")


class Screen(Console):
    """What gptmill draws on: past the gate of the streams, with the escapes of the drawing and none of the text."""

    def __init__(self, *, stderr: bool = False, highlight: bool = True) -> None:
        stream = find_raw(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, highlight=highlight, markup=False, force_jupyter=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=sanitize(segment.text))

    def push_render_hook(self, hook: RenderHook) -> None:
        """A live display has taken the place of guarded streams by now, and would obey what is written to them."""
        super().push_render_hook(hook)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, FileProxy) and isinstance(stream.rich_proxied_file, GuardedStream):
                setattr(sys, name, GuardedStream(cast("TextIO", stream)))

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError; rich would exit the process, and with it the run."""
        raise BrokenPipeError("standard output is closed")


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
        content = {"text/plain": sanitize(text)}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _find_shell() -> object | None:
    """IPython's shell; None without IPython, which is not imported for this."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
