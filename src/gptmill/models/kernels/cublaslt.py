"""cuBLASLt, NVIDIA's library for matmuls, as PyTorch itself has loaded it: of its ways to multiply, any can be taken.

To it a matrix lies column by column, so that one that lies row by row is the transpose to it. What is asked of it for
`a @ b` is therefore `b.T @ a.T`.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 * 2**20
MAX_ALGORITHMS = 16
SUM_IN_FP32, FP32 = 68, 0
FORMATS = {
    torch.float32: FP32,
    torch.bfloat16: 14,
    torch.float16: 2,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
WORKSPACE_LIMIT = 1


class Epilogue(IntEnum):
    """What is done with the sums before they are stored."""

    NOTHING = 1
    BIAS = 4
    GELU_AUX_BIAS = 164
    """The sums and a bias are stored beside the result, which is GELU (tanh) of them."""
    DGELU = 192
    """The sums are gradients of a GELU, and become those of what went into it, which is read from beside."""


class Attribute(IntEnum):
    """Of the description of a matmul."""

    TRANSPOSES_A = 3
    TRANSPOSES_B = 4
    EPILOGUE = 7
    BIAS = 8
    BESIDE = 11
    WIDTH_BESIDE = 12
    SCALE_OF_A = 17
    SCALE_OF_B = 18
    FORMAT_BESIDE = 22
    FAST_ACCUM = 25


class Matrix(NamedTuple):
    """How one lies in memory: row by row, or turned, as the transpose of one that does."""

    rows: int
    columns: int
    stride: int
    is_transposed: bool
    dtype: torch.dtype


class Matmul(NamedTuple):
    """All about `a @ b` but for the numbers."""

    a: Matrix
    b: Matrix
    result: torch.dtype
    epilogue: Epilogue
    is_scaled: bool
    use_fast_accum: bool

    @property
    def name(self) -> str:
        """For a file that remembers it."""
        parts = [" ".join(str(part).removeprefix("torch.") for part in matrix) for matrix in (self.a, self.b)]
        return ", ".join([*parts, *(str(part).removeprefix("torch.") for part in self[2:])])


class Algorithm(ctypes.Structure):
    """A way to multiply, as the library describes it."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Numbers(NamedTuple):
    """What is multiplied, and with what."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    beside: Tensor | None = None


class Plan:
    """A matmul on one device, with the ways that the library knows for it; first that which it thinks the fastest."""

    def __init__(self, matmul: Matmul, numbers: Numbers) -> None:
        self._matmul, self._device, self._lock = matmul, numbers.a.device, threading.Lock()
        self._handle = open_handle(self._device.index)
        self._description = create("cublasLtMatmulDescCreate", c_int(SUM_IN_FP32), c_int(FP32))
        self._set(Attribute.TRANSPOSES_A, c_int32(matmul.b.is_transposed))
        self._set(Attribute.TRANSPOSES_B, c_int32(matmul.a.is_transposed))
        self._set(Attribute.EPILOGUE, c_int32(matmul.epilogue))
        if matmul.use_fast_accum:
            self._set(Attribute.FAST_ACCUM, c_int8(1))
        if numbers.beside is not None:
            self._set(Attribute.WIDTH_BESIDE, c_int64(matmul.b.columns))
            self._set(Attribute.FORMAT_BESIDE, c_int32(FORMATS[matmul.result]))
        self._point_to(numbers)  # the library looks at how pointers are aligned
        self._layouts = [make_layout(matrix) for matrix in (matmul.b, matmul.a, self._find_result())]
        self.algorithms = self._list_ways()

    def run(self, numbers: Numbers, way: Algorithm) -> Tensor:
        """`a @ b`, scaled, and what else there is to it."""
        matmul = self._matmul
        result = torch.empty((matmul.a.rows, matmul.b.columns), dtype=matmul.result, device=self._device)
        workspace = torch.empty(way.workspace_bytes, dtype=torch.uint8, device=self._device)
        first, second, third = self._layouts
        with self._lock:  # the description is written to
            self._point_to(numbers)
            status = load_library().cublasLtMatmul(
                self._handle, self._description, byref(c_float(1.0)), c_void_p(numbers.b.data_ptr()), first,
                c_void_p(numbers.a.data_ptr()), second, byref(c_float(0.0)), c_void_p(result.data_ptr()), third,
                c_void_p(result.data_ptr()), third, byref(way.algorithm), c_void_p(workspace.data_ptr()),
                c_size_t(way.workspace_bytes), c_void_p(torch.cuda.current_stream(self._device).cuda_stream),
            )  # fmt: skip
        check("cublasLtMatmul", status)
        return result

    def _point_to(self, numbers: Numbers) -> None:
        for attribute, tensor in (
            (Attribute.BIAS, numbers.bias),
            (Attribute.SCALE_OF_A, numbers.scale_b),
            (Attribute.SCALE_OF_B, numbers.scale_a),
            (Attribute.BESIDE, numbers.beside),
        ):
            if tensor is not None:
                self._set(attribute, c_void_p(tensor.data_ptr()))

    def _find_result(self) -> Matrix:
        rows, columns = self._matmul.a.rows, self._matmul.b.columns
        return Matrix(rows, columns, columns, is_transposed=False, dtype=self._matmul.result)

    def _set(self, attribute: Attribute, value: Any) -> None:
        name = "cublasLtMatmulDescSetAttribute"
        size = c_size_t(ctypes.sizeof(value))
        check(name, load_library()[name](self._description, c_int(attribute), byref(value), size))

    def _list_ways(self) -> list[Algorithm]:
        library, preference = load_library(), create("cublasLtMatmulPreferenceCreate")
        limit = c_size_t(WORKSPACE_BYTES)
        name = "cublasLtMatmulPreferenceSetAttribute"
        check(name, library[name](preference, c_int(WORKSPACE_LIMIT), byref(limit), c_size_t(ctypes.sizeof(limit))))
        algorithms, count = (Algorithm * MAX_ALGORITHMS)(), c_int()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._description, *self._layouts, self._layouts[2], preference, c_int(MAX_ALGORITHMS),
            algorithms, byref(count),
        )  # fmt: skip
        library.cublasLtMatmulPreferenceDestroy(preference)
        return [way for way in algorithms[: count.value] if way.status == 0] if status == 0 else []


@cache
def load_library() -> Any:
    """Raises OSError where there is none."""
    if torch.version.cuda is None:
        raise OSError("this PyTorch has no CUDA")
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


@cache
def has_library() -> bool:
    try:
        load_library()
    except OSError:
        return False
    return True


def find_version() -> int:
    """The library's; what it says of its ways holds for this one alone."""
    library = load_library()
    library.cublasLtGetVersion.restype = c_size_t
    return int(library.cublasLtGetVersion())


@cache
def open_handle(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return create("cublasLtCreate")


def make_layout(matrix: Matrix) -> c_void_p:
    long, short = (matrix.rows, matrix.columns) if matrix.is_transposed else (matrix.columns, matrix.rows)
    return create(
        "cublasLtMatrixLayoutCreate", c_int(FORMATS[matrix.dtype]), c_uint64(long), c_uint64(short),
        c_int64(matrix.stride),
    )  # fmt: skip


def create(name: str, *arguments: Any) -> c_void_p:
    made = c_void_p()
    check(name, load_library()[name](byref(made), *arguments))
    return made


def check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} of cuBLASLt failed with status {status}")
