"""Exit codes, from which scripts and schedulers can tell what to do next.

Where sysexits.h defines a code, it is used: 74 for an input/output error (EX_IOERR), 75 for try again (EX_TEMPFAIL).
"""

from __future__ import annotations

FAILED = 1
USER_ERROR = 2
NOT_SAVED = 74
"""The run finished, but its last checkpoint could not be written."""
TIME_UP = 75
"""The run saved a checkpoint and stopped before its time limit."""
DIVERGED = 76
"""The run diverged: the spike detector used up max_rollbacks."""
HUNG = 77
"""The hang detector ended a worker that made no progress."""
CORRUPTED = 79
"""An audit found a rank that computes wrong numbers."""
INTERRUPTED = 130
"""Second Ctrl-C; after the first, and after other signals, a run saves and exits with 128 + the signal."""
