"""A fake of cuBLASLt with the documented interface, which multiplies column-major matrices on the CPU."""

# ruff: noqa: N802  the names are those of the library

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DATA_TYPES = {0: torch.float32, 14: torch.bfloat16, 2: torch.float16, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
EPILOGUE_AUX_POINTER, EPILOGUE_AUX_LD, A_SCALE_POINTER, B_SCALE_POINTER = 11, 12, 17, 18
HAS_BIAS, HAS_GELU, HAS_DGELU, HAS_AUX = 4, 32, 64, 128


class Layout(NamedTuple):
    dtype: torch.dtype
    rows: int
    columns: int
    stride: int

    def view(self, pointer: int) -> Tensor:
        return view(pointer, self.dtype, self.rows, self.columns, self.stride)


def view(pointer: int, dtype: torch.dtype, rows: int, columns: int, stride: int) -> Tensor:
    """The column-major matrix at the pointer."""
    assert stride >= rows, "columns would overlap"
    size = ((columns - 1) * stride + rows) * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=dtype)
    return memory.as_strided((rows, columns), (1, stride))


class FakeLibrary:
    """Handles of objects are indices into a list; functions that are not defined do not exist."""

    def __init__(self) -> None:
        self.objects: list[Any] = [None]  # handle 0 is null

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def _create(self, created: Any, content: Any) -> int:
        self.objects.append(content)
        created._obj.value = len(self.objects) - 1
        return 0

    def cublasLtMatmulDescCreate(self, created: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0)
        return self._create(created, {})

    def cublasLtMatmulDescSetAttribute(self, description: Any, name: Any, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[description.value][name.value] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, created: Any, kind: Any, rows: Any, columns: Any, stride: Any) -> int:
        return self._create(created, Layout(DATA_TYPES[kind.value], rows.value, columns.value, stride.value))

    def cublasLtMatmulPreferenceCreate(self, created: Any) -> int:
        return self._create(created, {})

    def cublasLtMatmulPreferenceSetAttribute(self, _preference: Any, name: Any, _value: Any, size: Any) -> int:
        assert (name.value, size.value) == (1, 8)
        return 0

    def cublasLtMatmulPreferenceDestroy(self, _preference: Any) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, most, algorithms, count = arguments
        assert most.value >= 3
        algorithms[0].status, algorithms[1].status, algorithms[2].status = 0, 15, 0  # the second is not supported
        algorithms[0].workspace_bytes = 100
        count._obj.value = 3
        return 0

    def cublasLtMatmul(
        self, _handle: Any, description: Any, alpha: Any, a: Any, a_layout: Any, b: Any, b_layout: Any, beta: Any,
        c: Any, c_layout: Any, d: Any, d_layout: Any, _algo: Any, workspace: Any, size: Any, _stream: Any,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        assert (c.value, c_layout.value) == (d.value, d_layout.value)
        assert bool(workspace.value) == bool(size.value)
        attributes = self.objects[description.value]
        left = self.objects[a_layout.value].view(a.value).float() * self._read_scale(attributes, A_SCALE_POINTER)
        right = self.objects[b_layout.value].view(b.value).float() * self._read_scale(attributes, B_SCALE_POINTER)
        left, right = left.t() if attributes[TRANSA] else left, right.t() if attributes[TRANSB] else right
        result = self.objects[d_layout.value].view(d.value)
        product, epilogue = left @ right, attributes[EPILOGUE]
        if epilogue & HAS_BIAS:
            product += view(attributes[BIAS_POINTER], result.dtype, len(result), 1, len(result)).float()
        if epilogue & HAS_AUX:
            aux = view(attributes[EPILOGUE_AUX_POINTER], result.dtype, *result.shape, attributes[EPILOGUE_AUX_LD])
            if epilogue & HAS_GELU:
                aux.copy_(product)
                product = F.gelu(product, approximate="tanh")
            if epilogue & HAS_DGELU:
                product = torch.ops.aten.gelu_backward(product, aux.float().contiguous(), approximate="tanh")
        result.copy_(product)
        return 0

    def _read_scale(self, attributes: dict[int, Any], name: int) -> float:
        return ctypes.c_float.from_address(attributes[name]).value if name in attributes else 1.0
