"""GEMMs by cuBLASLt, NVIDIA's library of matrix multiplications, called through ctypes with any of its algorithms.

PyTorch has loaded this library already, but takes the algorithm that its heuristic ranks first. This module asks for
all candidates, so that the caller can time them (`gemm.py`). What one GEMM needs:

- a description (cublasLtMatmulDesc_t) with attributes: which operands are transposed, the epilogue, scales of fp8
  operands;
- a layout of each matrix (cublasLtMatrixLayout_t): data type, sizes and leading dimension;
- the candidates of the heuristic for these (cublasLtMatmulHeuristicResult_t): each an opaque algorithm (tile sizes,
  stages, split-K, ...) and the bytes of workspace that it needs.

The library is column-major: to it, a row-major matrix is the transpose of itself. Since (a @ b).T = b.T @ a.T, asking
for the product of b and a, in this order, with row-major memory on all sides, gives `a @ b` without a copy. Hence
operands and their scales are swapped below: the library's A is our b.

An epilogue is applied to the fp32 sums in registers, before the result is stored, and saves a pass over it:

- BIAS adds a bias: result = a @ b + bias;
- GELU_AUX_BIAS is the forward pass of a linear layer and GELU: aux = a @ b + bias, result = gelu(aux). `aux`, an output
  of the result's shape, is what the backward pass needs;
- DGELU is the backward pass: result = (a @ b) * gelu'(aux), where a @ b is the gradient of GELU's output.

The numbers of enums, attributes and struct fields are those of cublasLt.h, cublas_api.h and library_types.h.
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
COMPUTE_32F = 68  # cublasComputeType_t
R_32F = 0  # cudaDataType_t
DATA_TYPES = {
    torch.float32: R_32F,
    torch.bfloat16: 14,
    torch.float16: 2,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
PREFERENCE_MAX_WORKSPACE_BYTES = 1


class Epilogue(IntEnum):
    """cublasLtEpilogue_t: what is applied to the sums before they are stored."""

    DEFAULT = 1
    BIAS = 4
    GELU_AUX_BIAS = 164
    DGELU = 192


class Attribute(IntEnum):
    """cublasLtMatmulDescAttributes_t."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    EPILOGUE_AUX_POINTER = 11
    EPILOGUE_AUX_LD = 12
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    EPILOGUE_AUX_DATA_TYPE = 22
    FAST_ACCUM = 25


class MatrixLayout(NamedTuple):
    """A matrix in memory: row-major, or transposed, as the view `.t()` of a row-major one."""

    rows: int
    columns: int
    stride: int
    is_transposed: bool
    dtype: torch.dtype


class GemmProblem(NamedTuple):
    """Everything about `a @ b` but the data: what an algorithm is chosen for."""

    a: MatrixLayout
    b: MatrixLayout
    result: torch.dtype
    epilogue: Epilogue
    is_scaled: bool
    use_fast_accum: bool

    @property
    def name(self) -> str:
        """Its part of a key in the autotuning cache, which is a file: it must not change."""
        parts = [" ".join(str(part).removeprefix("torch.") for part in matrix) for matrix in (self.a, self.b)]
        return ", ".join([*parts, *(str(part).removeprefix("torch.") for part in self[2:])])


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: a candidate, and what it needs."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Operands(NamedTuple):
    """The tensors of one GEMM."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    aux: Tensor | None = None
    """The epilogue's auxiliary matrix: an output of GELU_AUX_BIAS, an input of DGELU."""


class GemmPlan:
    """A GEMM on one device, with the library's candidates for it, the one that it estimates to be fastest first."""

    def __init__(self, problem: GemmProblem, operands: Operands) -> None:
        self._problem, self._device, self._lock = problem, operands.a.device, threading.Lock()
        self._handle = open_handle(self._device.index)
        self._description = create("cublasLtMatmulDescCreate", c_int(COMPUTE_32F), c_int(R_32F))
        self._set(Attribute.TRANSA, c_int32(problem.b.is_transposed))
        self._set(Attribute.TRANSB, c_int32(problem.a.is_transposed))
        self._set(Attribute.EPILOGUE, c_int32(problem.epilogue))
        if problem.use_fast_accum:
            self._set(Attribute.FAST_ACCUM, c_int8(1))
        if operands.aux is not None:
            self._set(Attribute.EPILOGUE_AUX_LD, c_int64(problem.b.columns))
            self._set(Attribute.EPILOGUE_AUX_DATA_TYPE, c_int32(DATA_TYPES[problem.result]))
        self._set_pointers(operands)  # the heuristic depends on the alignment of pointers
        self._layouts = [make_layout(matrix) for matrix in (problem.b, problem.a, self._make_result_layout())]
        self.algorithms = self._list_candidates()

    def run(self, operands: Operands, algorithm: Algorithm) -> Tensor:
        """`a @ b` with its scales and its epilogue."""
        problem = self._problem
        result = torch.empty((problem.a.rows, problem.b.columns), dtype=problem.result, device=self._device)
        workspace = torch.empty(algorithm.workspace_bytes, dtype=torch.uint8, device=self._device)
        first, second, third = self._layouts
        with self._lock:  # threads share the description, which holds the pointers
            self._set_pointers(operands)
            status = load_library().cublasLtMatmul(
                self._handle, self._description, byref(c_float(1.0)), c_void_p(operands.b.data_ptr()), first,
                c_void_p(operands.a.data_ptr()), second, byref(c_float(0.0)), c_void_p(result.data_ptr()), third,
                c_void_p(result.data_ptr()), third, byref(algorithm.algo), c_void_p(workspace.data_ptr()),
                c_size_t(algorithm.workspace_bytes), c_void_p(torch.cuda.current_stream(self._device).cuda_stream),
            )  # fmt: skip
        check("cublasLtMatmul", status)
        return result

    def _set_pointers(self, operands: Operands) -> None:
        for attribute, tensor in (
            (Attribute.BIAS_POINTER, operands.bias),
            (Attribute.A_SCALE_POINTER, operands.scale_b),
            (Attribute.B_SCALE_POINTER, operands.scale_a),
            (Attribute.EPILOGUE_AUX_POINTER, operands.aux),
        ):
            if tensor is not None:
                self._set(attribute, c_void_p(tensor.data_ptr()))

    def _make_result_layout(self) -> MatrixLayout:
        rows, columns = self._problem.a.rows, self._problem.b.columns
        return MatrixLayout(rows, columns, columns, is_transposed=False, dtype=self._problem.result)

    def _set(self, attribute: Attribute, value: Any) -> None:
        name = "cublasLtMatmulDescSetAttribute"
        size = c_size_t(ctypes.sizeof(value))
        check(name, load_library()[name](self._description, c_int(attribute), byref(value), size))

    def _list_candidates(self) -> list[Algorithm]:
        library, preference = load_library(), create("cublasLtMatmulPreferenceCreate")
        name, attribute = "cublasLtMatmulPreferenceSetAttribute", c_int(PREFERENCE_MAX_WORKSPACE_BYTES)
        limit = c_size_t(WORKSPACE_BYTES)
        check(name, library[name](preference, attribute, byref(limit), c_size_t(ctypes.sizeof(limit))))
        algorithms, count = (Algorithm * MAX_ALGORITHMS)(), c_int()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._description, *self._layouts, self._layouts[2], preference, c_int(MAX_ALGORITHMS),
            algorithms, byref(count),
        )  # fmt: skip
        library.cublasLtMatmulPreferenceDestroy(preference)
        return [algorithm for algorithm in algorithms[: count.value] if algorithm.status == 0] if status == 0 else []


@cache
def load_library() -> Any:
    """The library of PyTorch's CUDA version; raises OSError where there is none."""
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
    """The library's version: the candidates and their order may differ in another."""
    library = load_library()
    library.cublasLtGetVersion.restype = c_size_t
    return int(library.cublasLtGetVersion())


@cache
def open_handle(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return create("cublasLtCreate")


def make_layout(matrix: MatrixLayout) -> c_void_p:
    """Of the matrix as it lies in memory, in the library's column-major terms: contiguous dimension first."""
    inner, outer = (matrix.rows, matrix.columns) if matrix.is_transposed else (matrix.columns, matrix.rows)
    return create(
        "cublasLtMatrixLayoutCreate", c_int(DATA_TYPES[matrix.dtype]), c_uint64(inner), c_uint64(outer),
        c_int64(matrix.stride),
    )  # fmt: skip


def create(name: str, *arguments: Any) -> c_void_p:
    """Calls one of the library's functions that return a new object through their first argument."""
    created = c_void_p()
    check(name, load_library()[name](byref(created), *arguments))
    return created


def check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} of cuBLASLt failed with status {status}")
