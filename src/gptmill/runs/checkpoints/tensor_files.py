"""Reads and writes safetensors files. The library reads; we write, in order to hash the bytes as they are written.

The checksum is thus that of the tensors in memory, and the file need not be read back. No tensor is copied, and the
GIL, which the training thread needs too, is released while a chunk is hashed or written.
Format: the header's length in 8 bytes, little-endian; a JSON header; the tensors' bytes, one after the other.
A shard of a larger tensor has an entry in the header's metadata, whose values must be text: `{"shards": "{NAME:
[SHAPE, [[START, OFFSET, LENGTHS], ...]]}"}`, the shape being that of the larger tensor, of which the shard's part from
START on begins at OFFSET. A tensor without an entry is whole.
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
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json
from gptmill.config.regular_files import measure_untrusted, open_untrusted
from gptmill.runs.checkpoints.content import Held, Shard

# Widest first, the order of the tensors in the file: each then starts at a multiple of its element size.
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
CHUNK_BYTES = 16 << 20  # reacquiring the GIL from a busy thread takes 5 ms, twice per chunk
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 100_000
METADATA, SHARDS = "__metadata__", "shards"
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class FileDigest:
    """The checksum and size of a file."""

    sha256: str
    size_bytes: int


def write_tensors(path: Path, tensors: Mapping[str, Held]) -> FileDigest:
    """Writes and flushes a new file, hashing what it writes. Copies at most one non-contiguous tensor at a time."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in _make_chunks(tensors):
            digest.update(chunk)
            write_all(file, chunk)
            size_bytes += len(chunk)
        os.fsync(file.fileno())
    return FileDigest(digest.hexdigest(), size_bytes)


def measure_tensors(tensors: Mapping[str, Held]) -> int:
    """Returns the size of the file that `write_tensors` would write."""
    return len(_make_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def read_tensors(path: Path, expected: FileDigest) -> dict[str, Tensor]:
    """Reads the tensors of a file to the CPU; raises UserError unless it has the expected checksum and is valid."""
    check_file(path, expected)
    return load_tensors(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file of unknown checksum to the CPU; raises UserError unless it is valid."""
    read_header(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({error!s:.200}); use another checkpoint") from None
    return tensors


def check_file(path: Path, expected: FileDigest, *, thorough: bool = True) -> None:
    """Raises UserError unless it is a regular file of the expected size and, if thorough, checksum."""
    size_bytes = measure_untrusted(path)
    if size_bytes != expected.size_bytes:
        raise UserError(
            f"checkpoint {path.parent} is damaged: {path.name} has {size_bytes:,} bytes, not {expected.size_bytes:,}"
        )
    if not thorough:
        return
    try:
        with open_untrusted(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path}: {error.strerror or error}") from None
    if found != expected.sha256:
        raise UserError(f"checkpoint {path.parent} is damaged: the checksum of {path.name} is wrong")


def read_header(path: Path) -> dict[str, Any]:
    """Returns the header; raises UserError for pickles, and for one that is too large, not JSON or repeats a name.

    What it says is yet to be validated.
    """
    with open_untrusted(path) as file:
        start = file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    if start.startswith(PICKLES) and not header.startswith(b"{"):
        raise UserError(f"{path} is a pickle, which can execute code; gptmill does not load pickles")
    try:
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{length:,} bytes are too large")
        entries = parse_json(header, refuse_repeats=True)
        if not isinstance(entries, dict):
            raise ValueError("it is not an object")
        if len(entries) > MAX_TENSORS:
            raise ValueError(f"it has more than {MAX_TENSORS:,} tensors")
    except ValueError as error:
        raise UserError(
            f"{path} is not a valid safetensors file (its header: {error!s:.200}); use another checkpoint"
        ) from None
    return entries


def write_all(file: RawIOBase, data: bytes | memoryview) -> None:
    """Writes all bytes to an unbuffered file, which may accept fewer per call."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _make_chunks(tensors: Mapping[str, Held]) -> Iterator[bytes | memoryview]:
    """Yields the file's bytes in chunks that are views of the tensors."""
    yield _make_header(tensors)
    for _, tensor in _sort(tensors):
        dense = _take_local(tensor).detach().to("cpu").contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))  # reshape would keep a single element's stride
        view = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def _make_header(tensors: Mapping[str, Held]) -> bytes:
    """Returns the header after its length, padded with spaces so that the tensors start at a multiple of 8."""
    entries: dict[str, Any] = {}
    if shards := {name: _place(tensor) for name, tensor in tensors.items() if isinstance(tensor, Shard)}:
        entries[METADATA] = {SHARDS: _dump(shards)}
    end = 0
    for name, tensor in _sort(tensors):
        assert name != METADATA, "the format reserves this name"
        start, end = end, end + tensor.nbytes
        shape = list(_take_local(tensor).shape)
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = _dump(entries).encode()
    padded = text.ljust(math.ceil(len(text) / LENGTH_BYTES) * LENGTH_BYTES)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded


def _place(shard: Shard) -> list[Any]:
    return [shard.shape, [[part.start, part.box.offset, part.box.shape] for part in shard.list_parts()]]


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _take_local(tensor: Held) -> Tensor:
    return tensor.tensor if isinstance(tensor, Shard) else tensor


def _sort(tensors: Mapping[str, Held]) -> list[tuple[str, Held]]:
    order = {dtype: index for index, dtype in enumerate(DTYPES)}
    return sorted(tensors.items(), key=lambda item: (order[item[1].dtype], item[0]))
