"""A library with cuBLASLt's interface, as its documentation tells it, that multiplies on the CPU: column by column."""

# ruff: noqa: N802  the names are those of the library

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FORMATS = {0: torch.float32, 14: torch.bfloat16, 2: torch.float16, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
TRANSPOSES_A, TRANSPOSES_B, EPILOGUE, BIAS, BESIDE, WIDTH_BESIDE, SCALE_OF_A, SCALE_OF_B = 3, 4, 7, 8, 11, 12, 17, 18
HAS_BIAS, HAS_GELU, HAS_GELU_GRADIENT, HAS_BESIDE = 4, 32, 64, 128


class Layout(NamedTuple):
    dtype: torch.dtype
    rows: int
    columns: int
    stride: int

    def view(self, pointer: int) -> Tensor:
        return view(pointer, self.dtype, self.rows, self.columns, self.stride)


def view(pointer: int, dtype: torch.dtype, rows: int, columns: int, stride: int) -> Tensor:
    """The matrix there, which lies column by column."""
    assert stride >= rows, "columns would overlap"
    size = ((columns - 1) * stride + rows) * dtype.itemsize
    numbers = torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=dtype)
    return numbers.as_strided((rows, columns), (1, stride))


class FakeLibrary:
    """Objects are numbers; a function that is not here does not exist."""

    def __init__(self) -> None:
        self.objects: list[Any] = [None]  # 0 is no object

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def _make(self, made: Any, what: Any) -> int:
        self.objects.append(what)
        made._obj.value = len(self.objects) - 1
        return 0

    def cublasLtMatmulDescCreate(self, made: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0)
        return self._make(made, {})

    def cublasLtMatmulDescSetAttribute(self, description: Any, name: Any, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[description.value][name.value] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, made: Any, kind: Any, rows: Any, columns: Any, stride: Any) -> int:
        return self._make(made, Layout(FORMATS[kind.value], rows.value, columns.value, stride.value))

    def cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._make(made, {})

    def cublasLtMatmulPreferenceSetAttribute(self, _preference: Any, name: Any, _value: Any, size: Any) -> int:
        assert (name.value, size.value) == (1, 8)
        return 0

    def cublasLtMatmulPreferenceDestroy(self, _preference: Any) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, most, algorithms, count = arguments
        assert most.value >= 3
        algorithms[0].status, algorithms[1].status, algorithms[2].status = 0, 15, 0  # the second it cannot do
        algorithms[0].workspace_bytes = 100
        count._obj.value = 3
        return 0

    def cublasLtMatmul(
        self, _handle: Any, description: Any, alpha: Any, a: Any, a_layout: Any, b: Any, b_layout: Any, beta: Any,
        c: Any, c_layout: Any, d: Any, d_layout: Any, _way: Any, workspace: Any, size: Any, _stream: Any,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        assert (c.value, c_layout.value) == (d.value, d_layout.value)
        assert bool(workspace.value) == bool(size.value)
        told = self.objects[description.value]
        left = self.objects[a_layout.value].view(a.value).float() * self._read_scale(told, SCALE_OF_A)
        right = self.objects[b_layout.value].view(b.value).float() * self._read_scale(told, SCALE_OF_B)
        left, right = left.t() if told[TRANSPOSES_A] else left, right.t() if told[TRANSPOSES_B] else right
        result = self.objects[d_layout.value].view(d.value)
        product, work = left @ right, told[EPILOGUE]
        if work & HAS_BIAS:
            product += view(told[BIAS], result.dtype, len(result), 1, len(result)).float()
        if work & HAS_BESIDE:
            beside = view(told[BESIDE], result.dtype, *result.shape, told[WIDTH_BESIDE])
            if work & HAS_GELU:
                beside.copy_(product)
                product = F.gelu(product, approximate="tanh")
            if work & HAS_GELU_GRADIENT:
                product = torch.ops.aten.gelu_backward(product, beside.float().contiguous(), approximate="tanh")
        result.copy_(product)
        return 0

    def _read_scale(self, told: dict[int, Any], name: int) -> float:
        return ctypes.c_float.from_address(told[name]).value if name in told else 1.0
