"""Reads GGUF, the file format of llama.cpp: metadata and tensors, in bounded time and memory whatever the file claims.

The library `gguf` dequantises. Its own reader trusts the counts in a file, so the header is read here.
Format: magic, version, counts; key, type and value of each entry; name, shape, type and offset of each tensor; data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.regular_files import open_untrusted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
MAX_ENTRIES = 10_000
MAX_TENSORS = 100_000
MAX_VALUES = 2**21  # in arrays; a tokenizer has four for each of its up to 262,144 tokens
ALIGNMENT = 32
INSTALL = "reading GGUF needs the library gguf; run: pip install 'gptmill[export]'"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file, with its shape as torch has it: rows first."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int

    @property
    def row_count(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """A GGUF file, mapped into memory. Raises UserError for anything that is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_untrusted(path) as file:
            is_empty = not file.peek(1)
            self._data: NDArray[np.uint8] = np.zeros(0, "u1") if is_empty else np.memmap(file, np.uint8, mode="r")
        try:
            self.metadata, self.tensors = self._read_header()
        except (ValueError, struct.error, OverflowError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not a valid GGUF file ({error!s:.150}); download it again") from None

    def read(self, name: str, index: int | None = None) -> Tensor:
        """A tensor in fp32; with `index`, one matrix of a stack of them."""
        tensor = self.tensors[name]
        shape = tensor.shape if index is None else tensor.shape[1:]
        rows = tensor.row_count if index is None else tensor.row_count // tensor.shape[0]
        row_bytes = self._count_row_bytes(tensor)
        start = tensor.offset + (index or 0) * rows * row_bytes
        data = np.array(self._data[start : start + rows * row_bytes]).reshape(rows, row_bytes)
        return torch.from_numpy(_dequantise(data, tensor.type_number, name)).reshape(shape)

    def _count_row_bytes(self, tensor: GgufTensor) -> int:
        """The bytes of one row; raises ValueError for a type that is unknown or does not divide the row."""
        block, size = _find_block(tensor.type_number, tensor.name)
        if tensor.shape[-1] % block:
            raise ValueError(f"{tensor.name!r:.60} has rows of {tensor.shape[-1]}, not a multiple of {block}")
        return tensor.shape[-1] // block * size

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        cursor = _Cursor(self._data)
        magic, version = cursor.take_bytes(4), cursor.read("I")
        if magic != MAGIC:
            raise ValueError("it does not begin with GGUF")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, and gptmill reads {VERSIONS[0]} and {VERSIONS[1]}")
        tensor_count, entry_count = cursor.read("Q"), cursor.read("Q")
        metadata: dict[str, Any] = {}
        for _ in range(_bound(entry_count, MAX_ENTRIES)):
            key = cursor.read_text()
            if key in metadata:
                raise ValueError(f"{key!r:.60} occurs twice")
            metadata[key] = cursor.read_value(cursor.read("I"))
        found = [cursor.read_tensor() for _ in range(_bound(tensor_count, MAX_TENSORS))]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ValueError("its alignment is not valid")
        start = math.ceil(cursor.position / alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for tensor in found:
            placed = GgufTensor(tensor.name, tensor.shape, tensor.type_number, start + tensor.offset)
            if tensor.name in tensors:
                raise ValueError(f"{tensor.name!r:.60} occurs twice")
            if placed.offset + placed.row_count * self._count_row_bytes(placed) > len(self._data):
                raise ValueError(f"the file ends before {tensor.name!r:.60}")
            tensors[tensor.name] = placed
        return metadata, tensors


class _Cursor:
    """Reads one value after the other; raises ValueError at the end of the file."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self.position, self._values_left = data, 0, MAX_VALUES

    @property
    def left(self) -> int:
        return len(self._data) - self.position

    def take(self, size: int) -> NDArray[np.uint8]:
        if size > self.left:
            raise ValueError("the file ends inside its header")
        self.position += size
        return self._data[self.position - size : self.position]

    def take_bytes(self, size: int) -> bytes:
        return self.take(size).tobytes()

    def read(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take_bytes(struct.calcsize(f"<{code}")))[0]

    def read_text(self) -> str:
        return self.take_bytes(self.read("Q")).decode("utf-8")

    def read_value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.read(SCALARS[kind])
        if kind == STRING:
            return self.read_text()
        if kind != ARRAY:
            raise ValueError(f"its metadata has a value of type {kind}")
        kind, count = self.read("I"), _bound(self.read("Q"), self._values_left)
        self._values_left -= count
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if kind != STRING:
            raise ValueError(f"its metadata has an array of type {kind}")
        return [self.read_text() for _ in range(count)]

    def read_tensor(self) -> GgufTensor:
        name, dimensions = self.read_text(), self.read("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{name!r:.60} has {dimensions} dimensions")
        shape = tuple(self.read("Q") for _ in range(dimensions))[::-1]  # the file has the columns first
        if 0 in shape or math.prod(shape) > 1 << 40:
            raise ValueError(f"{name!r:.60} has the shape {shape!s:.60}")
        return GgufTensor(name, shape, self.read("I"), self.read("Q"))


def _bound(count: int, limit: int) -> int:
    """The count; raises ValueError for one that no model has: each takes time even where the file has the bytes."""
    if count > limit:
        raise ValueError(f"it claims {count:,} values, of which it may have {limit:,}")
    return count


def _find_block(number: int, name: str) -> tuple[int, int]:
    """Values in a block of a tensor's type, and its bytes."""
    library = load_library()
    try:
        block, size = library.GGML_QUANT_SIZES[library.GGMLQuantizationType(number)]
    except (ValueError, KeyError):
        raise ValueError(f"{name!r:.60} is of the unknown type {number}") from None
    return int(block), int(size)


def _dequantise(data: NDArray[np.uint8], number: int, name: str) -> NDArray[np.float32]:
    library = load_library()
    kind = library.GGMLQuantizationType(number)
    try:
        values: NDArray[np.float32] = library.quants.dequantize(data, kind)
    except NotImplementedError:
        raise UserError(f"{name} is of type {kind.name}, which cannot be dequantised; use another GGUF file") from None
    return values


def load_library() -> Any:
    """The module `gguf`; raises UserError with the line that installs it."""
    try:
        import gguf
    except ImportError:
        raise UserError(INSTALL) from None
    return gguf
