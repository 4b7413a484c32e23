"""Says what a process is doing while that takes long, so that nobody takes it for dead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FIRST_SECONDS = 5.0
REPEAT_SECONDS = 60.0


@contextmanager
def say_if_slow(doing: str) -> Iterator[None]:
    """Prints what the body is doing once that has taken some seconds, and then every minute."""
    done = threading.Event()

    def watch() -> None:
        seconds = FIRST_SECONDS
        while not done.wait(seconds if seconds == FIRST_SECONDS else REPEAT_SECONDS):
            with suppress(OSError, ValueError):  # nobody reads the output any more
                sys.stdout.write(f"{doing} ({seconds:.0f} s so far)\n")
                sys.stdout.flush()
            seconds += REPEAT_SECONDS

    watcher = threading.Thread(target=watch, name="slow-notice", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
