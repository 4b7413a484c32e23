"""Reads back what a Weights & Biases process stored on disk: its offline transaction log, run-ID.wandb.

The file is a LevelDB log: records in fragments, in blocks of 32 KiB, after a header of W&B's own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 1 << 15
FRAGMENT = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, LAST = 1, 2, 4


def read_last_step(folder: Path, run_id: str) -> int:
    """Returns the last step in the offline folders of a run; -1 if there is none."""
    paths = sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    steps = (record.history.step.num for path in paths for record in read_records(path) if record.HasField("history"))
    return max(steps, default=-1)


def read_records(path: Path) -> Iterator[Any]:
    """Yields every record as W&B's protocol buffer, up to where a kill cut the file short."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # its names depend on the version of protobuf
    for data in _read_log(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        yield record


def _read_log(data: bytes) -> Iterator[bytes]:
    position, parts = FILE_HEADER_BYTES, b""
    while position + FRAGMENT.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < FRAGMENT.size:
            position += left_in_block  # the end of a block that is too short for a fragment is padding
            continue
        _checksum, length, kind = FRAGMENT.unpack_from(data, position)
        position += FRAGMENT.size
        if kind == 0 or position + length > len(data):
            return
        fragment = data[position : position + length]
        position += length
        parts = fragment if kind in (FULL, FIRST) else parts + fragment
        if kind in (FULL, LAST):
            yield parts
