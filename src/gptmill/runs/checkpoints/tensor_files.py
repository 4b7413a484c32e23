"""Tensors in safetensors files. Reading is the library's work; writing is ours, to hash the bytes on their way.

So the checksum is that of the tensors in memory, not of what the disk gave back, and nothing is read again. No tensor
is copied, and Python's lock, which the thread that trains needs too, is free while a piece is hashed or written.
Format: the header's length in 8 bytes, little-endian; a JSON header; the tensors' bytes, one after the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.plain_files import measure_plain, open_plain

# Widest first, as the tensors lie in the file: each then begins at a multiple of its elements' size.
DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
PIECE_BYTES = 16 << 20  # getting the lock back from a busy thread takes 5 ms, twice a piece
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20  # 200,000 tensors and more
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class FileSum:
    """What tells a file from every other."""

    sha256: str
    size_bytes: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    """Writes a new file, flushed to the disk, and hashes what it writes. Holds one contiguous copy at most."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for piece in _cut(tensors):
            digest.update(piece)
            write_all(file, piece)
            size_bytes += len(piece)
        os.fsync(file.fileno())
    return FileSum(digest.hexdigest(), size_bytes)


def measure_tensors(tensors: Mapping[str, Tensor]) -> int:
    """The size of the file that `write_tensors` makes."""
    return len(_make_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def read_tensors(path: Path, expected: FileSum) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU; raises UserError unless the file is the expected one, and safe to open."""
    check_file(path, expected)
    _check_header(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no sound safetensors file ({error!s:.200}); use another checkpoint") from None
    return tensors


def check_file(path: Path, expected: FileSum, *, thorough: bool = True) -> None:
    """Raises UserError unless it is a plain file of the expected size and, if thorough, checksum."""
    size_bytes = measure_plain(path)
    if size_bytes != expected.size_bytes:
        raise UserError(
            f"checkpoint {path.parent} is damaged: {path.name} has {size_bytes:,} bytes, not {expected.size_bytes:,}"
        )
    if not thorough:
        return
    try:
        with open_plain(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path}: {error.strerror or error}") from None
    if found != expected.sha256:
        raise UserError(f"checkpoint {path.parent} is damaged: the checksum of {path.name} is wrong")


def write_all(file: RawIOBase, piece: bytes | memoryview) -> None:
    """An unbuffered file may take less than it is given."""
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]


def _cut(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file's bytes in pieces that lie where the tensors do."""
    yield _make_header(tensors)
    for _, tensor in _sort(tensors):
        dense = tensor.detach().to("cpu").contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))  # reshape would keep a single element's stride
        view = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _make_header(tensors: Mapping[str, Tensor]) -> bytes:
    """The header behind its length, padded with spaces so that the tensors begin at a multiple of 8."""
    entries, end = {}, 0
    for name, tensor in _sort(tensors):
        assert name != "__metadata__", "the format keeps this name for itself"
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    padded = text.ljust(math.ceil(len(text) / LENGTH_BYTES) * LENGTH_BYTES)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded


def _sort(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    order = {dtype: place for place, dtype in enumerate(DTYPES)}
    return sorted(tensors.items(), key=lambda item: (order[item[1].dtype], item[0]))


def _check_header(path: Path) -> None:
    """Refuses what is no such file at all, and what the library would open with too much memory or too little care."""
    with open_plain(path) as file:
        start = file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    if start.startswith(PICKLES) and not header.startswith(b"{"):
        raise UserError(f"{path} is a pickle, which could run code; gptmill does not open those")
    try:
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{length:,} bytes are too many")
        json.loads(header, object_pairs_hook=_refuse_doubles)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is no sound safetensors file (its header: {error!s:.200}); use another checkpoint"
        ) from None


def _refuse_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name stands there twice")
    return entries
