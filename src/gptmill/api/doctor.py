"""doctor: tries out what training needs of this machine."""

from __future__ import annotations

import os
import time

from gptmill.config.doctor_request import DoctorRequest
from gptmill.experiments.child_run import interrupt_on_termination
from gptmill.experiments.doctor.examination import examine
from gptmill.experiments.doctor.finding import Finding
from gptmill.runtime.interactive import Screen

PLAIN_SECONDS = 5.0
QUICK_SECONDS, FULL_SECONDS = 3, 10


def doctor(logdir: str | os.PathLike[str] = "runs", *, quick: bool = False) -> list[Finding]:
    """Findings on this machine, in groups; training works if the state of none is "failed". Takes seconds.

    `quick` leaves out what starts a compiler, several processes or arithmetic on a GPU.
    """
    return examine(os.fspath(logdir), quick=quick)


def run_doctor(request: DoctorRequest) -> list[Finding]:
    """The same with the progress on standard error."""
    console = Screen(stderr=True)
    started = last_line = time.monotonic()
    usual = QUICK_SECONDS if request.quick else FULL_SECONDS

    with interrupt_on_termination(), console.status("looking at this machine") as status:

        def say(doing: str) -> None:
            nonlocal last_line
            now = time.monotonic()
            line = f"trying {doing} ({now - started:.0f} s; usually about {usual} s)"
            if console.is_terminal:
                status.update(line)
            elif now - last_line > PLAIN_SECONDS:
                last_line = now
                console.print(line)

        return examine(request.logdir, quick=request.quick, say=say)
