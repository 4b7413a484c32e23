"""torch's flight recorder: the last collectives of each rank, in a file that `torchfrtrace` reads.

NCCL writes it when a collective exceeds its time-out; gptmill also when it ends a rank that hangs, which comes earlier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

BUFFER_SIZE = "2000"  # collectives; torch's own default since it records by default
# Each under its current name and the one before.
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PATH_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DUMP_FUNCTIONS = ("_dump_nccl_trace", "_dump_fr_trace")


@contextmanager
def set_up_flight_recorder(prefix: Path) -> Iterator[None]:
    """Names the files `prefix` + rank, for process groups opened inside; what the user's environment says stays."""
    wanted = dict.fromkeys(SIZE_VARIABLES, BUFFER_SIZE) | dict.fromkeys(PATH_VARIABLES, str(prefix.absolute()))
    wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    is_path_given = any(name in os.environ for name in PATH_VARIABLES)
    is_size_given = any(name in os.environ for name in SIZE_VARIABLES)
    kept = {*(PATH_VARIABLES if is_path_given else ()), *(SIZE_VARIABLES if is_size_given else ()), *os.environ}
    added = {name: value for name, value in wanted.items() if name not in kept}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def dump_flight_recorder(rank: int) -> Path | None:
    """Writes the rank's file; None if nothing was recorded, or it cannot be written."""
    prefix = next((os.environ[name] for name in PATH_VARIABLES if name in os.environ), None)
    library = torch._C._distributed_c10d
    dumps = [getattr(library, name) for name in DUMP_FUNCTIONS if hasattr(library, name)]
    if prefix is None or not dumps:
        return None
    with suppress(OSError, RuntimeError):
        path = Path(f"{prefix}{rank}")
        path.write_bytes(dumps[0]())
        return path
    return None
