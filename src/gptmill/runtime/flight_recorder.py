"""torch's flight recorder: the last collectives of each rank, in a file that `torchfrtrace` reads.

NCCL writes it when a collective exceeds its time-out; gptmill also when it ends a rank that hangs, which comes earlier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

BUFFER_SIZE = "2000"  # collectives; torch's own default since it records by default
# Each under its current name and the one before, of which newer versions of torch warn.
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PATH_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
FIRST_CURRENT = "2.10"
DUMP_FUNCTIONS = ("_dump_nccl_trace", "_dump_fr_trace")


@contextmanager
def set_up_flight_recorder(prefix: Path) -> Iterator[None]:
    """Names the files `prefix` + rank, for process groups opened inside; what the user's environment says stays."""
    wanted = {
        SIZE_VARIABLES: BUFFER_SIZE,
        PATH_VARIABLES: str(prefix.absolute()),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    newest = 0 if TorchVersion(torch.__version__) >= FIRST_CURRENT else -1
    added = {names[newest]: value for names, value in wanted.items() if not os.environ.keys() & set(names)}
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
