"""What cuBLASLt is asked for, answered by a library on the CPU that takes it at its word."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_cublaslt import FakeLibrary
from torch import Tensor

from gptmill.models.kernels import cublaslt
from gptmill.models.kernels.cublaslt import Epilogue, Matmul, Matrix, Numbers, Plan


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(cublaslt, "load_library", lambda: library)
    monkeypatch.setattr(cublaslt, "open_handle", lambda _device: ctypes.c_void_p(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0))


def draw(rows: int, columns: int, *, turned: bool = False, gap: int = 0) -> Tensor:
    """A matrix that lies row by row, with a gap between them, or the transpose of such a one."""
    shape = (columns, rows + gap) if turned else (rows, columns + gap)
    matrix = torch.randn(shape).bfloat16()
    return matrix[:, :rows].t() if turned else matrix[:, :columns]


def describe(matrix: Tensor) -> Matrix:
    is_transposed = matrix.stride(1) != 1
    return Matrix(
        matrix.shape[0], matrix.shape[1], matrix.stride(0 if not is_transposed else 1), is_transposed, matrix.dtype
    )


def multiply(numbers: Numbers, epilogue: Epilogue, result: torch.dtype = torch.bfloat16) -> Tensor:
    is_scaled = numbers.scale_a is not None
    matmul = Matmul(describe(numbers.a), describe(numbers.b), result, epilogue, is_scaled, use_fast_accum=False)
    plan = Plan(matmul, numbers)
    assert len(plan.algorithms) == 2  # those that it says it can do
    found = [plan.run(numbers, way) for way in plan.algorithms]
    assert found[0].equal(found[1])
    return found[0]


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
def test_a_product_of_matrices_however_they_lie(a_turned: bool, b_turned: bool, gap: int) -> None:
    a, b, bias = draw(6, 5, turned=a_turned, gap=gap), draw(5, 7, turned=b_turned, gap=gap), draw(1, 7)[0]
    torch.testing.assert_close(multiply(Numbers(a, b), Epilogue.NOTHING), a @ b)
    biased = (a.float() @ b.float() + bias.float()).bfloat16()
    torch.testing.assert_close(multiply(Numbers(a, b, bias), Epilogue.BIAS), biased)


def test_a_wide_product_is_not_rounded() -> None:
    a, b = draw(6, 5, turned=True), draw(5, 7)
    found = multiply(Numbers(a, b), Epilogue.NOTHING, torch.float32)
    torch.testing.assert_close(found, a.float() @ b.float())
    assert not found.equal(found.bfloat16().float())


def test_each_matrix_has_its_own_scale() -> None:
    a, b = draw(6, 16).to(torch.float8_e4m3fn), draw(7, 16).to(torch.float8_e5m2).t()
    scales = torch.tensor(0.5), torch.tensor(3.0)
    wanted = (1.5 * (a.float() @ b.float())).bfloat16()
    torch.testing.assert_close(multiply(Numbers(a, b, None, *scales), Epilogue.NOTHING), wanted)
    assert not torch.equal(multiply(Numbers(a, b, None, scales[0], scales[0]), Epilogue.NOTHING), wanted)


def test_what_goes_into_gelu_is_left_beside_it() -> None:
    a, b, bias, beside = draw(6, 5), draw(7, 5).t(), draw(1, 7)[0], torch.zeros(6, 7).bfloat16()
    inner = a.float() @ b.float() + bias.float()
    found = multiply(Numbers(a, b, bias, beside=beside), Epilogue.GELU_AUX_BIAS)
    torch.testing.assert_close(found, F.gelu(inner, approximate="tanh").bfloat16())
    assert beside.equal(inner.bfloat16())


def test_a_gradient_goes_back_through_gelu() -> None:
    gradient, weight, inner = draw(6, 5), draw(5, 7), draw(6, 7)
    wide = inner.float().requires_grad_()
    F.gelu(wide, approximate="tanh").backward(gradient.float() @ weight.float())
    assert wide.grad is not None
    found = multiply(Numbers(gradient, weight, beside=inner), Epilogue.DGELU)
    torch.testing.assert_close(found, wide.grad.bfloat16())


def test_what_the_library_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLibrary, "cublasLtMatmul", lambda *_: 13)
    with pytest.raises(RuntimeError, match="cublasLtMatmul of cuBLASLt failed with status 13"):
        multiply(Numbers(draw(6, 5), draw(5, 7)), Epilogue.NOTHING)
