"""Sequences of arrays in files: lengths known up front, each array memory-mapped on access. Knows no manifest."""

from __future__ import annotations

import mmap
import re
import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.config.regular_files import open_regular
from gptmill.data.tokenizers.protocol import TokenArray

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

IndexArray = NDArray[np.int64]
MAX_OPEN_MAPS = 4096
HEADER_BYTES = 128  # of a one-dimensional array saved by numpy
MAX_HEADER_BYTES = 10_000
MAGIC = b"\x93NUMPY"
LENGTH_BYTES = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}  # of the header's length, by version
# Numbers only; in one dimension, the order of Fortran is that of C.
HEADER = re.compile(
    rb"\{\s*'descr':\s*'([<>=|]?[biufc]\d{1,2})',\s*'fortran_order':\s*(?:False|True),\s*"
    rb"'shape':\s*\(([\d, ]{0,100})\),?\s*\}\s*"
)
SCAN_TOKENS = 1 << 22


class StoredArray(NamedTuple):
    """The location of a one-dimensional array in a file."""

    path: Path
    dtype: np.dtype[Any]
    length: int
    offset: int

    def map(self) -> NDArray[Any]:
        """Returns the array, memory-mapped."""
        with open_regular(self.path) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(content, self.dtype, self.length, self.offset)


def find_array(path: Path) -> StoredArray:
    """Locates the array of an `.npy` file. Raises OSError, or ValueError that says what is wrong with the file."""
    with open_regular(path) as file:
        stored = _parse_header(path, file)
        size_bytes = file.seek(0, 2)
    expected_bytes = stored.offset + stored.length * stored.dtype.itemsize
    if size_bytes != expected_bytes:
        raise ValueError(f"{size_bytes:,} bytes long, but its header implies {expected_bytes:,}")
    return stored


def _parse_header(path: Path, file: BinaryIO) -> StoredArray:
    """Parses by regular expression: numpy's parser evaluates Python, and takes longer than the rest of opening."""
    magic, version = file.read(len(MAGIC)), file.read(2)
    if magic != MAGIC or version not in LENGTH_BYTES:
        raise ValueError("it does not begin as an .npy file does")
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES[version]), "little")
    found = HEADER.fullmatch(file.read(min(header_bytes, MAX_HEADER_BYTES)))
    if found is None:
        raise ValueError("its header does not describe an array of numbers")
    dtype, shape = (part.decode() for part in found.groups())
    lengths = [int(length) for length in shape.split(",") if length.strip().isdigit()]
    if len(lengths) != 1:
        raise ValueError(f"an array of shape ({shape}), not one-dimensional")
    try:
        return StoredArray(path, np.dtype(dtype), lengths[0], file.tell())
    except TypeError:
        raise ValueError(f"its dtype {dtype} does not exist") from None


class LazyArrays(Sequence[NDArray[Any]]):
    """A sequence of arrays, each opened on access. `names` are for error messages."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[NDArray[Any], ...]: ...

    def __getitem__(self, index: int | slice) -> NDArray[Any] | tuple[NDArray[Any], ...]:
        chosen = range(len(self.names))[index]
        return self.open_array(chosen) if isinstance(chosen, int) else tuple(map(self.open_array, chosen))

    @property
    @abstractmethod
    def lengths(self) -> IndexArray:
        """Returns the length of each array."""

    @abstractmethod
    def open_array(self, index: int) -> NDArray[Any]:
        """Opens the array with this index."""


class MapPool:
    """Open memory maps, bounded in number: beyond the limit, the one that was opened first is closed."""

    def __init__(self) -> None:
        self._maps: dict[str, NDArray[Any]] = {}
        self._limit = _find_max_maps()
        self._lock = threading.Lock()

    def open(self, stored: StoredArray) -> NDArray[Any]:
        array = stored.map()
        with self._lock:
            while len(self._maps) >= self._limit:
                del self._maps[next(iter(self._maps))]
            self._maps[str(stored.path)] = array
        return array

    def find(self, path: str) -> NDArray[Any] | None:
        return self._maps.get(path)

    def drop(self, path: str) -> None:
        with self._lock:
            self._maps.pop(path, None)

    def drop_deleted(self) -> None:
        """Closes maps of deleted files, which occupy disk space as long as they are mapped."""
        with self._lock:
            self._maps = {path: array for path, array in self._maps.items() if Path(path).exists()}


def _find_max_maps() -> int:
    """Returns how many maps may be open: Python holds a file descriptor for each, and other code needs some too."""
    if resource is None:
        return MAX_OPEN_MAPS
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_MAPS if descriptors == resource.RLIM_INFINITY else max(1, min(MAX_OPEN_MAPS, descriptors // 8))


class MappedArrays(LazyArrays):
    """Arrays in local files."""

    def __init__(self, files: Sequence[StoredArray], pool: MapPool) -> None:
        super().__init__([str(file.path) for file in files])
        self.files = files
        self._pool = pool

    @cached_property
    def lengths(self) -> IndexArray:
        return np.array([file.length for file in self.files], dtype=np.int64)

    def open_array(self, index: int) -> NDArray[Any]:
        if (array := self._pool.find(self.names[index])) is not None:
            return array
        try:
            return self._pool.open(self.files[index])
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.names[index]} changed while in use ({error}); restore it or prepare the corpus again"
            ) from None


class ScannedStarts(LazyArrays):
    """Document starts of arrays that come without a list of them: the positions of end_of_text, scanned on access."""

    def __init__(self, arrays: MappedArrays, end_of_text: int) -> None:
        super().__init__(arrays.names)
        self._arrays = arrays
        self._end_of_text = end_of_text
        self._found: dict[int, IndexArray] = {}

    @cached_property
    def lengths(self) -> IndexArray:
        return np.array([len(array) for array in self], dtype=np.int64)

    def open_array(self, index: int) -> IndexArray:
        if index not in self._found:
            self._found[index] = find_starts(self._arrays[index], self._end_of_text)
        return self._found[index]


def find_starts(tokens: TokenArray, end_of_text: int) -> IndexArray:
    """Returns the positions of end_of_text, scanned in blocks to bound memory."""
    blocks = range(0, len(tokens), SCAN_TOKENS)
    found = [np.flatnonzero(tokens[start : start + SCAN_TOKENS] == end_of_text) + start for start in blocks]
    return np.concatenate([np.empty(0, dtype=np.int64), *found])
