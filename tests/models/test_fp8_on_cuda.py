"""fp8 on the GPU that has it, against its emulation on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gptmill.models.fused.fp8_layers import build_fp8_linear
from gptmill.models.kernels.fp8 import fp8_linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with fp8"
)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def measure_distance(result: Tensor, exact: Tensor) -> float:
    result, exact = result.detach().cpu().double(), exact.detach().cpu().double()
    return float((result - exact).norm() / exact.norm())


def measure_all(device: str, x: Tensor, weight: Tensor, grad: Tensor, emulated: bool) -> list[Tensor]:
    """The result, and the gradients of the input and the weight."""
    x, weight = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    y = fp8_linear(x, weight, emulated)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], grad.to(device))]


@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 32, 48), (4096, 768, 3072), (512, 768, 50304)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gpu_multiplies_what_the_emulation_does(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, width_in, width_out = shape
    x, weight = draw(rows, width_in).to(dtype), draw(width_out, width_in, seed=2)
    grad = draw(rows, width_out, seed=3).to(dtype)
    emulated = measure_all("cpu", x, weight, grad, emulated=True)
    real = measure_all("cuda", x, weight, grad, emulated=False)
    assert [tensor.dtype for tensor in real] == [dtype, dtype, torch.float32]
    for on_gpu, on_cpu in zip(real, emulated, strict=True):
        assert measure_distance(on_gpu, on_cpu) < 0.01  # bf16's rounding, and fast accumulation


@pytest.mark.parametrize("place", ["x", "weight", "grad"])
def test_what_is_not_finite_is_not_hidden(place: str) -> None:
    tensors = {"x": draw(16, 32), "weight": draw(48, 32, seed=2), "grad": draw(16, 48, seed=3)}
    tensors[place][3, 5] = float("inf")
    y, grad_x, grad_weight = measure_all("cuda", **tensors, emulated=False)
    assert y.isnan().any() == (place != "grad")
    assert grad_x.isnan().any() == (place != "x")
    assert grad_weight.isnan().any() == (place != "weight")


def test_zeros_stay_zeros() -> None:
    tensors = measure_all("cuda", torch.zeros(16, 32), draw(48, 32), torch.zeros(16, 48), emulated=False)
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_it_compiles_whole() -> None:
    layer = build_fp8_linear(nn.Linear(256, 512, device="cuda"), emulated=False)
    x = draw(4, 128, 256).cuda().requires_grad_()
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = run(x)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
    for plain, traced in zip(*results, strict=True):
        assert traced.dtype == plain.dtype
        assert measure_distance(traced, plain) < 0.05  # what is rounded to bf16 on the way differs, and then to fp8


def test_the_backward_keeps_a_byte_for_each_number() -> None:
    weight, x = torch.randn(1024, 1024, device="cuda", requires_grad=True), torch.randn(65536, 1024, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        fp8_linear(x, weight, emulated=False)  # the first call also allocates a workspace
        before = torch.cuda.memory_allocated()
        y = fp8_linear(x, weight, emulated=False)
        kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    assert kept <= 1.05 * (x.numel() + weight.numel())
