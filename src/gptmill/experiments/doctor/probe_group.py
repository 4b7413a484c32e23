"""The parent's side of probes: a child process runs a group of them; one that crashes or hangs costs only itself.

The child is started again for the probes behind the one that ended it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

from gptmill.config.json_text import parse_json
from gptmill.experiments.doctor.probe_process import PREFIX
from gptmill.runtime.child import describe_exit, open_child

PROGRAM = (sys.executable, "-m", "gptmill.experiments.doctor.probe_process")
POLL_SECONDS = 0.02
MAX_SHOWN = 300


@dataclass(frozen=True)
class Probe:
    """A function of a module of this package, called in a child process."""

    name: str
    module: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 60.0
    """How long it may take, the start of the process included."""


@dataclass(frozen=True)
class Result:
    """What a probe returned, or why it returned nothing."""

    value: Any = None
    error: str = ""


class ProbeGroup:
    """Probes that share a child process. Poll it until it is done."""

    def __init__(self, probes: Sequence[Probe], stack: ExitStack, program: Sequence[str] = PROGRAM) -> None:
        self.results: dict[str, Result] = {}
        self._pending = list(probes)
        self._program, self._stack = program, stack
        self._start()

    @property
    def is_done(self) -> bool:
        return not self._pending

    @property
    def current(self) -> str:
        """The name of the probe that runs now; empty when all are done."""
        return self._pending[0].name if self._pending else ""

    def poll(self) -> None:
        """Collects results; a child that ended or takes too long is the result of the probe that it was at."""
        if self.is_done:
            return
        code = self._process.poll()  # before reading: what it wrote last must not be lost
        self._collect()
        if self.is_done:
            self._child.close()
        elif code is not None:
            self._fail(f"the process ended with {describe_exit(code)}{self._describe_output()}")
        elif time.monotonic() > self._deadline:
            self._fail(f"no answer within {self._pending[0].seconds:.0f} s")

    def _start(self) -> None:
        self._child = self._stack.enter_context(ExitStack())
        self._output = Path(self._child.enter_context(tempfile.TemporaryDirectory(prefix="gptmill-doctor-"))) / "output"
        written = self._child.enter_context(self._output.open("wb"))
        calls = [
            {"name": probe.name, "module": probe.module, "function": probe.function, "arguments": probe.arguments}
            for probe in self._pending
        ]
        command = [*self._program, json.dumps(calls)]
        self._process: Popen[bytes] = self._child.enter_context(open_child(command, written, written))
        self._deadline = time.monotonic() + self._pending[0].seconds

    def _collect(self) -> None:
        answers = [line for line in self._read().split("\n") if line.startswith(PREFIX)]
        for line in answers:
            answer = parse_json(line.removeprefix(PREFIX))
            if self._pending and answer["name"] == self._pending[0].name:
                self.results[answer["name"]] = Result(answer["value"], _shorten(answer["error"]))
                self._advance()

    def _advance(self) -> None:
        self._pending.pop(0)
        if self._pending:
            self._deadline = time.monotonic() + self._pending[0].seconds

    def _fail(self, error: str) -> None:
        self.results[self.current] = Result(error=_shorten(error))
        self._child.close()
        self._advance()
        if self._pending:
            self._start()

    def _read(self) -> str:
        """All whole lines so far."""
        text = self._output.read_text(encoding="utf-8", errors="replace")
        return text[: text.rfind("\n") + 1]

    def _describe_output(self) -> str:
        lines = [line.strip() for line in self._read().split("\n") if line.strip() and not line.startswith(PREFIX)]
        return f": {lines[-1]}" if lines else ""


def wait_for(groups: Iterable[ProbeGroup], others: Iterable[ProbeGroup], say: Callable[[str], None]) -> None:
    """Polls until the groups are done, the others along with them."""
    waited, polled = list(groups), [*groups, *others]
    while not all(group.is_done for group in waited):
        for group in polled:
            group.poll()
        running = ", ".join(sorted({group.current for group in polled if group.current}))
        if running:
            say(running)
        time.sleep(POLL_SECONDS)


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
