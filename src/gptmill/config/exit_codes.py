"""What a process ends with, so that scripts and schedulers can tell what to do next.

Where sysexits.h has a number for the same thing, that is the one: 74 an input or output error, 75 try again later.
"""

from __future__ import annotations

FAILED = 1
USER_ERROR = 2
NOT_SAVED = 74
"""The run has come to its end, and its last checkpoint could not be written."""
TIME_UP = 75
"""Saved and stopped before its time limit."""
DIVERGED = 76
"""The guard has gone back as often as it may."""
HUNG = 77
"""A worker that made no progress ended itself."""
INTERRUPTED = 130
"""By a second Ctrl-C; after the first, and after other signals, a run saves and ends with 128 + the signal."""
