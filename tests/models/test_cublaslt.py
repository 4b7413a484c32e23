"""The calls of cuBLASLt, answered by a fake library on the CPU that does exactly what they ask for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_cublaslt import FakeLibrary
from torch import Tensor

from gptmill.models.kernels import cublaslt
from gptmill.models.kernels.cublaslt import Epilogue, GemmPlan, GemmProblem, MatrixLayout, Operands


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(cublaslt, "load_library", lambda: library)
    monkeypatch.setattr(cublaslt, "open_handle", lambda _device: ctypes.c_void_p(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0))


def draw(rows: int, columns: int, *, transposed: bool = False, gap: int = 0) -> Tensor:
    """A row-major matrix with a gap between its rows, or the transpose of one."""
    shape = (columns, rows + gap) if transposed else (rows, columns + gap)
    matrix = torch.randn(shape).bfloat16()
    return matrix[:, :rows].t() if transposed else matrix[:, :columns]


def describe(matrix: Tensor) -> MatrixLayout:
    is_transposed = matrix.stride(1) != 1
    return MatrixLayout(
        matrix.shape[0], matrix.shape[1], matrix.stride(0 if not is_transposed else 1), is_transposed, matrix.dtype
    )


def run_gemm(operands: Operands, epilogue: Epilogue, result: torch.dtype = torch.bfloat16) -> Tensor:
    is_scaled = operands.scale_a is not None
    problem = GemmProblem(describe(operands.a), describe(operands.b), result, epilogue, is_scaled, use_fast_accum=False)
    plan = GemmPlan(problem, operands)
    assert len(plan.algorithms) == 2  # those that the library supports
    found = [plan.run(operands, algorithm) for algorithm in plan.algorithms]
    assert found[0].equal(found[1])
    return found[0]


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
def test_a_product_of_matrices_in_any_layout(a_transposed: bool, b_transposed: bool, gap: int) -> None:
    a, b, bias = (
        draw(6, 5, transposed=a_transposed, gap=gap),
        draw(5, 7, transposed=b_transposed, gap=gap),
        draw(1, 7)[0],
    )
    torch.testing.assert_close(run_gemm(Operands(a, b), Epilogue.DEFAULT), a @ b)
    biased = (a.float() @ b.float() + bias.float()).bfloat16()
    torch.testing.assert_close(run_gemm(Operands(a, b, bias), Epilogue.BIAS), biased)


def test_an_fp32_product_is_not_rounded() -> None:
    a, b = draw(6, 5, transposed=True), draw(5, 7)
    found = run_gemm(Operands(a, b), Epilogue.DEFAULT, torch.float32)
    torch.testing.assert_close(found, a.float() @ b.float())
    assert not found.equal(found.bfloat16().float())


def test_each_matrix_has_its_own_scale() -> None:
    a, b = draw(6, 16).to(torch.float8_e4m3fn), draw(7, 16).to(torch.float8_e5m2).t()
    scales = torch.tensor(0.5), torch.tensor(3.0)
    wanted = (1.5 * (a.float() @ b.float())).bfloat16()
    torch.testing.assert_close(run_gemm(Operands(a, b, None, *scales), Epilogue.DEFAULT), wanted)
    assert not torch.equal(run_gemm(Operands(a, b, None, scales[0], scales[0]), Epilogue.DEFAULT), wanted)


def test_the_input_of_gelu_is_stored_as_aux() -> None:
    a, b, bias, aux = draw(6, 5), draw(7, 5).t(), draw(1, 7)[0], torch.zeros(6, 7).bfloat16()
    inner = a.float() @ b.float() + bias.float()
    found = run_gemm(Operands(a, b, bias, aux=aux), Epilogue.GELU_AUX_BIAS)
    torch.testing.assert_close(found, F.gelu(inner, approximate="tanh").bfloat16())
    assert aux.equal(inner.bfloat16())


def test_dgelu_computes_the_gradient_of_gelus_input() -> None:
    gradient, weight, inner = draw(6, 5), draw(5, 7), draw(6, 7)
    wide = inner.float().requires_grad_()
    F.gelu(wide, approximate="tanh").backward(gradient.float() @ weight.float())
    assert wide.grad is not None
    found = run_gemm(Operands(gradient, weight, aux=inner), Epilogue.DGELU)
    torch.testing.assert_close(found, wide.grad.bfloat16())


def test_what_the_library_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLibrary, "cublasLtMatmul", lambda *_: 13)
    with pytest.raises(RuntimeError, match="cublasLtMatmul of cuBLASLt failed with status 13"):
        run_gemm(Operands(draw(6, 5), draw(5, 7)), Epilogue.DEFAULT)
