"""Where the program starts: a Ctrl-C ends it without a traceback while modules are imported, and is never lost.

Imports as little as possible itself: what Python has loaded already.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # signal itself imports enum
import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130  # as in config.exit_codes, which is not imported yet


def main() -> int:
    """Returns the exit code."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if is_ours:
        signal.signal(signal.SIGINT, exit_quietly)
        sys.unraisablehook = repeat_lost_interrupt
    from gptmill.cli.main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def exit_quietly(_number: int, _frame: object) -> None:
    """Nothing has been opened or printed yet. An exception could be lost or rewritten by the module that it meets."""
    os.write(2, b"gptmill: interrupted\n")
    os._exit(INTERRUPTED)


def repeat_lost_interrupt(lost: UnraisableHookArgs) -> None:
    """Sends a Ctrl-C again that Python raised where nobody can catch it, as in a callback of the import system."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(interrupt_soon, ())
    else:
        sys.__unraisablehook__(lost)


def interrupt_soon() -> None:
    """Interrupts the main thread once it has left the callback."""
    time.sleep(0.01)
    _thread.interrupt_main()
