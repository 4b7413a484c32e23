"""Where the program starts: a Ctrl-C while modules are imported ends it without a traceback.

Imports as little as possible itself: what Python has loaded already.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # signal itself imports enum
import os

INTERRUPTED = 130  # as in config.exit_codes, which is not imported yet


def main() -> int:
    """Returns the exit code."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if is_ours:
        signal.signal(signal.SIGINT, exit_quietly)
    from gptmill.cli.main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def exit_quietly(_number: int, _frame: object) -> None:
    """Nothing has been opened or printed yet. An exception could be lost or rewritten by the module that it meets."""
    os.write(2, b"gptmill: interrupted\n")
    os._exit(INTERRUPTED)
